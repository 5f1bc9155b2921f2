"""`uncalibrated`: the logits as they come; the first stage of every method that changes only the box."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.logit_maps.base import LogitMap, Solution
from boxcal.calibrators.parametrised import vector


class Identity(LogitMap):
    """Return the logits unchanged; it has no parameters."""

    name = "uncalibrated"

    def forward(self, scores: Tensor) -> Tensor:
        """Return (N, K) logits as they are."""
        return scores

    def starts(self) -> Sequence[Tensor]:
        """One start: the empty vector."""
        return [vector()]

    def solve(self, data: ValidationSet, seed: int, tick: Callable[[float], None]) -> Solution:
        """There is nothing to find."""
        del data, seed, tick
        return Solution(0.0, 1, 1, 0)
