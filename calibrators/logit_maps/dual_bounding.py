"""`dpb`: dual probability bounding, which learns the dual variable of a box (section 4.3 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from calibrators.logit_maps.base import LogitMap, parameter


class DualProbabilityBounding(LogitMap):
    """`T(g) = g - S_d(w * g)`, with the soft threshold `S_d(u) = u - clip(u, -d, d)`.

    `shift_weights` (K,) is the paper's w >= 0 and `shift_threshold` its d > 0. Every class whose weighted
    logit exceeds d in size is drawn back. Weights of zero change nothing.
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

    def complaint(self) -> str | None:
        """Weights and threshold are not negative."""
        lowest = min(self.shift_weights.min().item(), self.shift_threshold.item())
        return None if lowest >= 0.0 else f"a shift weight or the shift threshold is {lowest}, below 0"

    def starts(self) -> Sequence[Tensor]:
        """Equal weights with a threshold that nearly all, many or few logits exceed."""
        grid = ((0.5, 0.1), (0.5, 1.0), (0.9, 3.0))
        return [torch.tensor([w] * self.num_classes + [math.log(d)], dtype=torch.float64) for w, d in grid]

    def limits(self) -> Sequence[tuple[float | None, float | None]]:
        """Weights of zero to ten; thresholds of a millionth to a million."""
        return [(0.0, 10.0)] * self.num_classes + [(math.log(1e-6), math.log(1e6))]
