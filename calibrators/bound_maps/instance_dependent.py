"""`pb-mlp`: bounds that a small network sets for every sample (section 3.4 of the paper)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from boxcal.calibrators.bound_maps.base import BoundMap, box_at
from boxcal.calibrators.network import TopLogitsNetwork

VACUOUS = -40.0
"""An output whose logistic is nothing in float64."""


class InstanceDependentBounds(BoundMap):
    """One box per row, from the ten largest mapped logits; as good as vacuous when fresh."""

    name = "pb-mlp"
    is_network = True

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.network = TopLogitsNetwork(num_classes, [VACUOUS, VACUOUS])

    def box(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Give lower and upper, each (N, 1)."""
        fraction, slack = torch.split(torch.sigmoid(self.network(logits)), 1, dim=1)
        return box_at(fraction, slack, self.num_classes)

    def starts_at(self, box: Tensor) -> Sequence[Tensor]:
        """Answer the given box everywhere, with two draws of the hidden layers."""
        outputs = [float(value - torch.log1p(-value.exp())) for value in box.clamp(-14.0, -1e-3)]
        return [self.network.start(outputs, seed) for seed in range(2)]

    def prepare(self, logits: Tensor) -> None:
        """Let the network see how large the mapped logits are."""
        self.network.prepare(logits)
