"""`dpb`: dual probability bounding, which learns the dual variable of a box (the paper's equation for DPB)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from calibrators.logit_maps.base import LogitMap, parameter


class DualProbabilityBounding(LogitMap):
    """`T(g) = g - S_d(w * g)`, with the soft threshold `S_d(u) = u - clip(u, -d, d)`.

    `shift_weights` (K,) is the paper's w >= 0 and `shift_threshold` its d > 0. Every class whose weighted logit
    exceeds d in size is drawn back. Weights of zero change nothing.
    """

    name: ClassVar[str] = "dpb"

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.shift_weights = parameter(torch.zeros(num_classes))
        self.shift_threshold = parameter(1.0)

    def forward(self, scores: Tensor) -> Tensor:
        """Shift (N, K) logits by their soft-thresholded, weighted selves."""
        weighted = self.shift_weights * scores
        return scores - (weighted - weighted.clamp(-self.shift_threshold, self.shift_threshold))

    def parameters_from(self, coordinates: Tensor) -> dict[str, Tensor]:
        """Read K weights as they are, then the log of the threshold."""
        return {"shift_weights": coordinates[:-1], "shift_threshold": coordinates[-1].exp()}

    def starts(self) -> Sequence[Tensor]:
        """Equal weights of a half or one, with thresholds over two orders of magnitude."""
        grid = [(w, d) for w in (0.5, 0.9) for d in (0.3, 1.0, 3.0, 10.0)]
        return [torch.tensor([w] * self.num_classes + [math.log(d)], dtype=torch.float64) for w, d in grid]

    def limits(self) -> Sequence[tuple[float | None, float | None]]:
        """Weights of zero to ten; thresholds of a millionth to a million."""
        return [(0.0, 10.0)] * self.num_classes + [(math.log(1e-6), math.log(1e6))]
