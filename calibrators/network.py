"""The small network that instance-dependent temperatures and bounds come from (Tomani et al. 2022)."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from boxcal.calibrators.parametrised import parameter

TOP = 10
"""How many of the largest logits it sees."""
HIDDEN = 5


class TopLogitsNetwork(nn.Module):
    """Two hidden layers of five tanh units over the ten largest logits of a row, in float64.

    The logits are standardised by their mean and spread on the validation set, so that any backbone's are of
    the same size. The output layer starts at zero weights.

    Parameters
    ----------
    num_classes : int
        K; with fewer than ten classes all logits are seen.
    outputs : sequence of float
        What a fresh network answers for any row.
    """

    centre: Tensor
    spread: Tensor

    def __init__(self, num_classes: int, outputs: list[float]) -> None:
        super().__init__()
        seen = min(TOP, num_classes)
        self._seen: tuple[weakref.ref[Tensor], Tensor] | None = None
        self.register_buffer("centre", torch.zeros(seen, dtype=torch.float64))
        self.register_buffer("spread", torch.ones(seen, dtype=torch.float64))
        self.weight_1 = parameter(torch.zeros(HIDDEN, seen))
        self.bias_1 = parameter(torch.zeros(HIDDEN))
        self.weight_2 = parameter(torch.zeros(HIDDEN, HIDDEN))
        self.bias_2 = parameter(torch.zeros(HIDDEN))
        self.weight_3 = parameter(torch.zeros(len(outputs), HIDDEN))
        self.bias_3 = parameter(outputs)

    def forward(self, logits: Tensor) -> Tensor:
        """Map (N, K) logits to (N, outputs) numbers."""
        hidden = torch.tanh((self._top(logits) - self.centre) / self.spread @ self.weight_1.T + self.bias_1)
        hidden = torch.tanh(hidden @ self.weight_2.T + self.bias_2)
        return hidden @ self.weight_3.T + self.bias_3

    def _top(self, logits: Tensor) -> Tensor:
        """Give the largest logits; a fit that asks again for those of the same tensor waits only once."""
        if self._seen is not None and self._seen[0]() is logits:
            return self._seen[1]
        top = logits.topk(len(self.centre), dim=1).values
        if not logits.requires_grad:
            self._seen = (weakref.ref(logits), top)
        return top

    def prepare(self, logits: Tensor) -> None:
        """Learn mean and spread of the logits it will see."""
        top = self._top(logits)
        self.centre.copy_(top.mean(dim=0))
        self.spread.copy_(top.std(dim=0, correction=0).clamp_min(1e-6))

    def start(self, outputs: list[float], seed: int) -> Tensor:
        """Coordinates of a network that answers `outputs` everywhere, with random hidden layers."""
        generator = torch.Generator().manual_seed(seed)
        pieces = []
        for name, own in self.named_parameters():
            fan_in = own.shape[-1] if own.ndim == 2 else HIDDEN
            piece = torch.randn(own.shape, generator=generator, dtype=torch.float64) / fan_in**0.5
            if name == "weight_3":
                piece = torch.zeros_like(own)
            if name == "bias_3":
                piece = torch.tensor(outputs, dtype=torch.float64)
            pieces.append(piece.flatten())
        return torch.cat(pieces)
