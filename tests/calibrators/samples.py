"""Validation sets drawn from a known model, for the tests of fits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from boxcal.calibrators import Calibrator

Array = np.ndarray[Any, Any]
Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
Set = tuple[Floats, Labels]


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
    """Confident logits of which a share of the labels is drawn at random: bounds are what they miss."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, num_classes, generator=generator, dtype=torch.float64) * 4.0
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    wrong = torch.rand(num_samples, generator=generator) < share
    labels[wrong] = torch.randint(num_classes, (int(wrong.sum()),), generator=generator)
    return logits, labels


def drawn(count: int = 1000, classes: int = 10, *, temperature: float = 1.5, seed: int = 0) -> Set:
    """The same as `overconfident`, as arrays."""
    rng = np.random.default_rng(seed)
    logits = 2.5 * rng.normal(size=(count, classes))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    return temperature * logits, labels


def variants(count: int, classes: int, each: int, noise: float = 0.1) -> tuple[Floats, Labels, Labels]:
    """Give samples in some variants each, whose logits differ a little, and which sample a row is of."""
    logits, labels = drawn(count // each, classes)
    sample = np.repeat(np.arange(count // each), each)
    differences = np.random.default_rng(1).normal(0.0, noise, (len(sample), classes))
    return logits[sample] + differences, labels[sample], sample


def softmax(logits: Floats) -> Floats:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: Floats = exponentials / exponentials.sum(axis=1, keepdims=True)
    return result


def sharpened(count: int, classes: int, sharpness: float, seed: int = 0) -> Set:
    """Logits that are `sharpness` times too large, of a modest classifier."""
    rng = np.random.default_rng(seed)
    honest = 1.5 * rng.normal(size=(count, classes))
    labels = (softmax(honest).cumsum(axis=1) < rng.random((count, 1))).sum(axis=1)
    return sharpness * honest, labels.clip(0, classes - 1)


@dataclass(frozen=True)
class Everything:
    """A validation set with all that any method reads: the backbone is its own last layer."""

    logits: Tensor
    labels: Tensor
    features: Tensor
    head: tuple[Tensor, Tensor]
    inputs: Tensor

    def backbone(self, inputs: Tensor) -> Tensor:
        weight, bias = (part.float() for part in self.head)
        return inputs @ weight.T + bias

    def extras(self) -> dict[str, Any]:
        """What `fit` takes besides logits and labels."""
        return {
            "features": self.features,
            "head": self.head,
            "inputs": self.inputs,
            "backbone": self.backbone,
        }

    def source(self, calibrator: Calibrator) -> Tensor:
        """What the calibrator is called with."""
        if calibrator.reads == "features":
            return self.features
        if calibrator.input_shift is not None:
            return self.backbone((self.inputs + calibrator.input_shift).float()).double()
        return self.logits


def everything(num_samples: int, num_classes: int, *, seed: int = 0) -> Everything:
    """Features, their head, and labels of which a tenth is drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(num_samples, 9, generator=generator, dtype=torch.float64) * 2.0
    weight = torch.randn(num_classes, 9, generator=generator, dtype=torch.float64)
    bias = torch.randn(num_classes, generator=generator, dtype=torch.float64) / 4.0
    logits = features @ weight.T + bias
    labels = torch.multinomial((logits / 1.5).softmax(1), 1, generator=generator)[:, 0]
    wrong = torch.rand(num_samples, generator=generator) < 0.1
    labels[wrong] = torch.randint(num_classes, (int(wrong.sum()),), generator=generator)
    return Everything(logits, labels, features, (weight, bias), features.float())


def mean_nll(logits: Array, labels: Array) -> float:
    return float((np.logaddexp.reduce(logits, axis=1) - logits[np.arange(len(labels)), labels]).mean())


def nll_of(calibrator: Calibrator, logits: torch.Tensor, labels: torch.Tensor) -> float:
    return -calibrator(logits).gather(1, labels[:, None]).log().mean().item()


def central_differences(
    function: Callable[[Floats], float], point: Floats, directions: Floats | None = None
) -> Floats:
    """Slopes along some directions, each a row, or along every coordinate."""
    steps = (np.eye(len(point)) if directions is None else directions) * 1e-6
    return np.array([(function(point + step) - function(point - step)) / 2e-6 for step in steps])
