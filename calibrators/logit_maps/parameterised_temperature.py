"""`pts`: parameterised temperature scaling, a temperature for every sample (Tomani et al. 2022; IBTS/PTS)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.network import TopLogitsNetwork

WIDEST = 3.0
"""Temperatures lie between exp(-3) and exp(3), whatever logits arrive."""


class ParameterisedTemperature(LogitMap):
    """`T(g) = g / temperature(g)`, the temperature from a small network over the ten largest logits."""

    name = "pts"
    is_network = True

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.network = TopLogitsNetwork(num_classes, [0.0])

    def forward(self, scores: Tensor) -> Tensor:
        """Divide every row of (N, K) logits by its own temperature."""
        return scores * torch.exp(-WIDEST * torch.tanh(self.network(scores) / WIDEST))

    def starts(self) -> Sequence[Tensor]:
        """Answer 1 everywhere, with three draws of the hidden layers."""
        return [self.network.start([0.0], seed) for seed in range(3)]

    def prepare(self, data: ValidationSet) -> None:
        """Let the network see how large the logits are."""
        self.network.prepare(data.scores)
