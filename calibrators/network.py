"""The small network that instance-dependent temperatures and bounds come from (Tomani et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from boxcal.calibrators import formulas, tensor_ops
from boxcal.calibrators.formulas import CENTRED, HIDDEN, LOG_SURPRISAL, TOP
from boxcal.calibrators.parametrised import Parametrised, parameter

FLAT = 1e-3
DRAWS = 5
"""How many networks a fit descends with, each from random hidden layers of its own."""
NARROWEST = 1e-12
"""Spread of an entry that is the same in all rows."""


class TopLogitsNetwork(nn.Module):
    """Two hidden layers of tanh units over the ten largest logits of a row, in float64.

    It reads -log(1 + surprisal) of these ten, where their surprisal is their log-softmax with its sign
    changed: among rows whose largest logits are close, what it answers must change quickly, and far from
    there slowly. Or it reads these ten less the mean of all logits of the row: their log-softmax does not
    tell how far they are above the others; with ten classes there are no others. What it reads is divided by
    its root mean square on the validation set, or standardised entry by entry.

    Parameters
    ----------
    num_classes : int
        K; with fewer than ten classes all logits are read.
    outputs : sequence of float
        What a fresh network answers for any row.
    hidden : int
        Units of each layer: five, and five times as many for the mean of several networks.
    """

    added_later = ("normalised",)
    hidden_layers = ("weight_1", "bias_1", "weight_2", "bias_2")
    centre: Tensor
    spread: Tensor
    normalised: Tensor
    """`LOG_SURPRISAL` or `CENTRED`; stored networks may read `LOG_SOFTMAX`, or the logits (0)."""

    def __init__(self, num_classes: int, outputs: Sequence[float], hidden: int = HIDDEN) -> None:
        super().__init__()
        inputs = min(TOP, num_classes)
        self.register_buffer("centre", torch.zeros(inputs, dtype=torch.float64))
        self.register_buffer("spread", torch.ones(inputs, dtype=torch.float64))
        self.register_buffer("normalised", torch.zeros((), dtype=torch.float64))
        self.weight_1 = parameter(torch.zeros(hidden, inputs))
        self.bias_1 = parameter(torch.zeros(hidden))
        self.weight_2 = parameter(torch.zeros(hidden, hidden))
        self.bias_2 = parameter(torch.zeros(hidden))
        self.weight_3 = parameter(torch.zeros(len(outputs), hidden))
        self.bias_3 = parameter(outputs)

    def forward(self, logits: Tensor) -> Tensor:
        """Map (N, K) logits to (N, outputs) numbers."""
        outputs: Tensor = formulas.network(tensor_ops, self, logits)
        return outputs

    def saturation(self, logits: Tensor) -> float:
        """Share of the hidden units whose slope is below FLAT, over all rows."""
        slopes = [1.0 - hidden.square() for hidden in formulas.hidden_layers(tensor_ops, self, logits)]
        return float((torch.stack(slopes) < FLAT).double().mean())

    def prepare(self, logits: Tensor, reading: float = LOG_SURPRISAL, *, by_entry: bool = False) -> None:
        """Choose what it will read, and learn the size of that, entry by entry or of all together."""
        self.normalised.fill_(reading)
        self.centre.zero_()
        self.spread.fill_(1.0)
        read = formulas.network_reads(tensor_ops, self, logits)
        if by_entry:
            self.centre.copy_(read.mean(dim=0))
            self.spread.copy_(read.std(dim=0, correction=0).clamp_min(NARROWEST))
        else:
            self.spread.fill_(read.square().mean().sqrt())

    def adopt(self, other: TopLogitsNetwork) -> None:
        """Read what another network reads."""
        for own, theirs in zip(self.buffers(), other.buffers(), strict=True):
            own.copy_(theirs)

    def start(self, outputs: Sequence[float], seed: int) -> Tensor:
        """Coordinates of a network that answers `outputs` everywhere, with random hidden layers."""
        generator = torch.Generator().manual_seed(seed)
        pieces = []
        for name, own in self.named_parameters():
            fan_in = own.shape[-1] if own.ndim == 2 else len(own)
            piece = torch.randn(own.shape, generator=generator, dtype=torch.float64) / fan_in**0.5
            if name == "weight_3":
                piece = torch.zeros_like(own)
            if name == "bias_3":
                piece = torch.tensor(outputs, dtype=torch.float64)
            pieces.append(piece.flatten())
        return torch.cat(pieces)

    def mean(self, members: Sequence[Tensor]) -> TopLogitsNetwork:
        """Build the network whose answer is the mean of those that this one gives at several coordinates."""
        named = list(self.named_parameters())
        pieces = [torch.split(member, [own.numel() for _, own in named]) for member in members]
        layers = {
            name: [part.reshape(own.shape) for part in parts]
            for (name, own), parts in zip(named, zip(*pieces, strict=True), strict=True)
        }
        outputs = torch.stack(layers["bias_3"]).mean(dim=0)
        wide = TopLogitsNetwork(len(self.centre), outputs.tolist(), len(members) * len(self.bias_1))
        wide.adopt(self)
        with torch.no_grad():
            for name in ("weight_1", "bias_1", "bias_2"):
                wide.get_parameter(name).copy_(torch.cat(layers[name]))
            for place, square in enumerate(layers["weight_2"]):
                units = slice(place * len(square), (place + 1) * len(square))
                wide.weight_2[units, units] = square
            wide.weight_3.copy_(torch.cat(layers["weight_3"], dim=1) / len(members))
        return wide


def fixed_between(module: nn.Module, plain: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Say of each coordinate of a map whether it stays as it is between a network and a plain answer.

    These are the hidden layers, and all of a network that answers differently from row to row at the
    coordinates `plain` (size,) too. Returns bool (size,).
    """
    named = [(name, own.numel()) for name, own in module.named_parameters()]
    parts = np.split(plain, np.cumsum([size for _, size in named])[:-1])
    varies = any(
        part.any() for (name, _), part in zip(named, parts, strict=False) if name.endswith("weight_3")
    )
    fixed = [
        np.full(size, "network." in name and (varies or name.endswith(TopLogitsNetwork.hidden_layers)))
        for name, size in named
    ]
    return np.concatenate([np.empty(0, bool), *fixed])


class NetworkMap(Parametrised):
    """A map whose parameters are those of a network."""

    is_network = True
    outputs: tuple[float, ...]
    """What a fresh network answers."""

    def __init__(self, num_classes: int, hidden: int = HIDDEN) -> None:
        super().__init__(num_classes)
        self.network = TopLogitsNetwork(num_classes, self.outputs, hidden)

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], num_classes: int) -> Self:
        """Build a map with as many hidden units as the stored network has."""
        square = tensors.get("network.weight_2", torch.zeros(HIDDEN, HIDDEN))
        return cls(num_classes, len(square) if square.shape == square.T.shape else HIDDEN)

    def invalid_reason(self) -> str | None:
        """Say so if a tensor is not positive, or this version does not know what the network reads."""
        return super().invalid_reason() or formulas.invalid_reading(self, self.num_classes)

    def averaged(self, members: Sequence[Tensor]) -> Self:
        """Give a map whose network answers the mean of networks at several coordinates."""
        mean = deepcopy(self)
        mean.network = self.network.mean(members)
        return mean

    def with_each_reading(self, logits: Tensor) -> list[Self]:
        """Give a map for each choice of what its network may read of (N, K) logits, its own first."""
        kinds = [(LOG_SURPRISAL, True)] + [(CENTRED, False)] * (self.num_classes > TOP)
        others = [deepcopy(self) for _ in kinds]
        for other, (reading, by_entry) in zip(others, kinds, strict=True):
            other.network.prepare(logits, reading, by_entry=by_entry)
        return [self, *others]
