"""`lb`: logit bounding, which clips the logits instead of the probabilities (section 4.1 of the paper)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators import formulas, tensor_ops
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.logit_maps.base import LogitMap, Solution
from boxcal.calibrators.parametrised import Limits, parameter, vector


class LogitBounding(LogitMap):
    """`T(g) = clip(g, c |g|, C |g|)` with |g| the Euclidean norm of the row.

    `logit_lower` and `logit_upper` are the paper's c and C divided by that norm, tanh(c') and
    tanh(c' + softplus(C')): -1 <= c <= C <= 1. At -1 and 1 nothing is clipped.
    """

    name = "lb"

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.logit_lower = parameter(-1.0)
        self.logit_upper = parameter(1.0)

    def forward(self, scores: Tensor) -> Tensor:
        """Clip (N, K) logits to limits that grow with the row's norm."""
        mapped: Tensor = formulas.logit_bounding(tensor_ops, self, scores)
        return mapped

    def parameters_from(self, coordinates: Tensor) -> dict[str, Tensor]:
        """Read the lower limit, and the upper one as the share of what lies above the lower."""
        lower, share = coordinates
        return {"logit_lower": lower, "logit_upper": lower + (1.0 - lower) * share}

    def starts(self) -> Sequence[Tensor]:
        """Limits from the whole range down to narrow ones around zero."""
        uppers = (1.0, 0.9, 0.7, 0.5, 0.35, 0.25, 0.15, 0.08)
        lowers = (-1.0, -0.5, -0.3, -0.15, -0.05, 0.0, 0.05)
        return [vector(low, (high - low) / (1.0 - low)) for high in uppers for low in lowers]

    def limits(self) -> Limits:
        """Limit the lower end to -1 to just below 1, and the share to 0 to 1."""
        return [(-1.0, 1.0 - 1e-6), (0.0, 1.0)]

    def coordinates(self) -> np.ndarray[Any, Any]:
        """Give the lower limit and the share."""
        lower, upper = self.logit_lower.item(), self.logit_upper.item()
        return np.array([lower, (upper - lower) / (1.0 - lower)])

    def solve(self, data: ValidationSet, seed: int, tick: Callable[[float], None]) -> Solution:
        """Search both limits over sorted rows."""
        from boxcal.calibrators.fitting.clip_limits import fit_limits  # noqa: PLC0415 - only fits need scipy

        minimum = fit_limits(
            data.scores,
            data.labels,
            self.limits(),
            seed=seed,
            tick=tick,
            thorough=self.thorough,
            weights=data.row_weights,
        )
        self.set_coordinates(torch.from_numpy(minimum.coordinates))
        return Solution(minimum.gradient_norm, minimum.starts, minimum.starts_agreeing, minimum.evaluations)

    def invalid_reason(self) -> str | None:
        """Say so if the limits are not in order."""
        return formulas.invalid_limits(self, self.num_classes)
