"""`uncalibrated`: the logits as they come; the first stage of every method that changes only the box."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

import numpy as np

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.maps.base import RowTemperature
from boxcal.calibrators.maps.parameters import Array, Gradients, Parameters, Solution, Values, Vjp


class IdentityMap(RowTemperature):
    """`T(g) = g`: the logits unchanged."""

    name = "uncalibrated"
    stacked = "always"

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Return (N, K) logits as they are."""
        del ops, p
        return scores

    def inverse(self, p: Parameters, reading: Array) -> tuple[Array, Vjp]:
        """Give 1 for every row."""
        del p

        def back(by_inverse: Array) -> tuple[Gradients, None]:
            del by_inverse
            return {}, None

        return np.ones(reading.shape[1]), back

    def starts(self) -> Sequence[Array]:
        return [np.empty(0)]

    def solve(self, data: ValidationSet, tick: Callable[[float], None]) -> Solution:
        del data, tick
        return Solution(0.0, 1, 1, 0)
