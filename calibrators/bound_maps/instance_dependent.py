"""`pb-mlp`: bounds that a small network sets for every sample (section 3.4 of the paper)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Self

import torch
from torch import Tensor

from boxcal.calibrators import formulas, tensor_ops
from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.network import DRAWS, NetworkMap
from boxcal.calibrators.parametrised import Parametrised

VACUOUS = -40.0
"""An output whose logistic is 0 in float64."""
SATURATED = -4.0
"""Starts keep above this: below, the slope of the logistic is too small to descend along."""


class InstanceDependentBounds(NetworkMap, BoundMap):
    """One box per row, from the ten largest mapped logits; as good as vacuous when fresh."""

    name = "pb-mlp"
    outputs = (VACUOUS, VACUOUS)

    def box(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Give lower and upper, each (N, 1)."""
        found: tuple[Tensor, Tensor] = formulas.instance_box(tensor_ops, self, logits)
        return found

    def starts_at(self, box: Tensor) -> Sequence[Sequence[Tensor]]:
        """Answer the given box everywhere, as far as that leaves slopes to descend along; or the middle."""
        near = self.constant_outputs(box.clamp(SATURATED, -0.05))
        return [
            [self.network.start(outputs, seed) for seed in range(DRAWS)] for outputs in (near, [0.0, 0.0])
        ]

    def coordinates_of(self, other: Parametrised) -> Tensor:
        """Take over constant bounds."""
        return self.network.start(self.constant_outputs(torch.from_numpy(other.coordinates())), 0)

    @staticmethod
    def constant_outputs(box: Tensor) -> list[float]:
        """Give outputs whose logistics are the exponentials of (log of lower K, log of slack)."""
        return [float(value - torch.log1p(-value.exp())) for value in box]

    def prepare(self, logits: Tensor) -> None:
        """Let the network see the mapped logits."""
        self.network.prepare(logits)

    def variants(self, logits: Tensor) -> Sequence[Self]:
        """Give a map for each choice of what the network reads, where there is one."""
        return self.with_each_reading(logits)

    def reading_as(self, other: BoundMap) -> Self:
        """Adopt it, if the other one has a network."""
        own = deepcopy(self)
        if isinstance(other, InstanceDependentBounds):
            own.network.adopt(other.network)
        return own

    def saturation(self, logits: Tensor) -> float:
        """Ask the network."""
        return self.network.saturation(logits)
