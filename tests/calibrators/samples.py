"""Validation sets drawn from a known model, for the tests of fits."""

import torch
from torch import Tensor


def overconfident(
    num_samples: int, num_classes: int, *, temperature: float = 2.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Logits that are `temperature` times too large, and labels drawn from the right ones."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, num_classes, generator=generator, dtype=torch.float64) * 2.5
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return logits * temperature, labels


def contaminated(
    num_samples: int, num_classes: int, *, share: float = 0.1, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Confident logits of which a share of the labels is drawn at random: bounds are what they lack."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, num_classes, generator=generator, dtype=torch.float64) * 4.0
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    wrong = torch.rand(num_samples, generator=generator) < share
    labels[wrong] = torch.randint(num_classes, (int(wrong.sum()),), generator=generator)
    return logits, labels
