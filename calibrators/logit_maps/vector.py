"""`vector`: vector scaling, a factor and an offset for every class (Guo et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.parametrised import parameter


class VectorScaling(LogitMap):
    """`T(g) = w * g + w'`, entry by entry."""

    name = "vector"

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.factors = parameter(torch.ones(num_classes))
        self.offsets = parameter(torch.zeros(num_classes))

    def forward(self, scores: Tensor) -> Tensor:
        """Scale and shift every class of (N, K) logits."""
        return scores * self.factors + self.offsets

    def starts(self) -> Sequence[Tensor]:
        """Start at the identity: the loss is convex."""
        return [torch.cat([torch.ones(self.num_classes), torch.zeros(self.num_classes)]).double()]
