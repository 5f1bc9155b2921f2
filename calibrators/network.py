"""The small network that instance-dependent temperatures and bounds come from (Tomani et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from boxcal.calibrators import formulas, tensor_ops
from boxcal.calibrators.formulas import CENTRED, HIDDEN, LOG_SOFTMAX, TOP
from boxcal.calibrators.parametrised import parameter

FLAT = 1e-3
DRAWS = 4
"""How many random hidden layers a fit starts from."""


class TopLogitsNetwork(nn.Module):
    """Two hidden layers of five tanh units over the ten largest logits of a row, in float64.

    It reads the log-softmax of these ten, or these less the mean of all logits of the row, divided by one
    number, the root mean square on the validation set: standardised entry by entry, networks do worse on new
    data. The log-softmax does not tell how far these ten are above the others; with ten classes there are no
    others.

    Parameters
    ----------
    num_classes : int
        K; with fewer than ten classes all logits are read.
    outputs : sequence of float
        What a fresh network answers for any row.
    """

    added_later = ("normalised",)
    centre: Tensor
    spread: Tensor
    normalised: Tensor
    """`LOG_SOFTMAX` or `CENTRED`; 0 in networks that were stored before 0.2.0, which read the logits."""

    def __init__(self, num_classes: int, outputs: Sequence[float]) -> None:
        super().__init__()
        inputs = min(TOP, num_classes)
        self.register_buffer("centre", torch.zeros(inputs, dtype=torch.float64))
        self.register_buffer("spread", torch.ones(inputs, dtype=torch.float64))
        self.register_buffer("normalised", torch.zeros((), dtype=torch.float64))
        self.weight_1 = parameter(torch.zeros(HIDDEN, inputs))
        self.bias_1 = parameter(torch.zeros(HIDDEN))
        self.weight_2 = parameter(torch.zeros(HIDDEN, HIDDEN))
        self.bias_2 = parameter(torch.zeros(HIDDEN))
        self.weight_3 = parameter(torch.zeros(len(outputs), HIDDEN))
        self.bias_3 = parameter(outputs)

    def forward(self, logits: Tensor) -> Tensor:
        """Map (N, K) logits to (N, outputs) numbers."""
        outputs: Tensor = formulas.network(tensor_ops, self, logits)
        return outputs

    def saturation(self, logits: Tensor) -> float:
        """Share of the hidden units whose slope is below FLAT, over all rows."""
        slopes = [1.0 - hidden.square() for hidden in formulas.hidden_layers(tensor_ops, self, logits)]
        return float((torch.stack(slopes) < FLAT).double().mean())

    def prepare(self, logits: Tensor, reading: float = LOG_SOFTMAX) -> None:
        """Choose what it will read, and learn the size of that."""
        self.normalised.fill_(reading)
        self.spread.fill_(formulas.network_reads(tensor_ops, self, logits).square().mean().sqrt())

    def start(self, outputs: Sequence[float], seed: int) -> Tensor:
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


class HasNetwork(Protocol):
    """A map whose parameters are those of a network."""

    num_classes: int
    network: TopLogitsNetwork


Map = TypeVar("Map", bound=HasNetwork)


def with_each_reading(prepared: Map, logits: Tensor) -> list[Map]:
    """Give a map for each choice of what its network may read of (N, K) logits, the one given first."""
    if prepared.num_classes <= TOP:
        return [prepared]
    other = deepcopy(prepared)
    other.network.prepare(logits, CENTRED)
    return [prepared, other]
