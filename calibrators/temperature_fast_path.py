"""The compiled engine on arrays, and the short way for calibrators that are one temperature and one box.

A handful of rows costs less than the tensor operations around them. `Calibrator.calibrate` goes the short
way, and so does `ArrayCalibrator`: the answers are the same to the last bit. Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from boxcal.calibrators.maps.base import BoxMap, LogitMap
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.maps.temperature import TemperatureScaling
from boxcal.calibrators.operator.checks import raise_for_row
from boxcal.calibrators.operator.constants import sum_tolerance

Array = np.ndarray[Any, np.dtype[np.float64]]
NO_SIDE, NO_HELD = np.empty((1, 0), np.int8), np.empty(0, np.bool_)
"""What the loops note beside the probabilities is for gradients."""
INVERSE = np.ones(1)
"""The temperature is the logit map's; the operator's own is 1."""


def solve_rows(logits: Array, lower: Array, upper: Array) -> Array:
    """Give the box-constrained softmax of rows (N, K), for bounds that broadcast to them."""
    rows = np.ascontiguousarray(logits)
    if lower.shape[-1:] in ((), (1,)) and upper.shape[-1:] in ((), (1,)):
        low, high = (np.ascontiguousarray(bound.reshape(-1)) for bound in (lower, upper))
        if len(low) != len(high):
            low, high = (np.broadcast_to(bound, len(rows)).copy() for bound in (low, high))
    else:
        shape = (max(_height(lower), _height(upper)), rows.shape[1])
        low, high = (np.ascontiguousarray(np.broadcast_to(bound, shape)) for bound in (lower, upper))
    return _solve(rows, low, high, sum_tolerance(rows.shape[1]))


def _height(bound: Array) -> int:
    return len(bound) if bound.ndim == 2 else 1


@cache
def _compiled_loop() -> Callable[..., int]:
    from boxcal.calibrators.operator.cpu_loops import forward_rows  # noqa: PLC0415 - numba loads when needed

    return forward_rows


@cache
def _compiled_summary() -> Callable[..., int]:
    from boxcal.calibrators.operator.cpu_loops import summarised_rows  # noqa: PLC0415 - as above

    return summarised_rows


def _solve(rows: Array, low: Array, high: Array, tolerance: float) -> Array:
    probabilities = np.empty_like(rows)
    refused = _compiled_loop()(rows, low, high, INVERSE, tolerance, probabilities, NO_SIDE, NO_HELD)
    if refused >= 0:
        lower, upper = (bound if bound.ndim == 2 else bound[:, None] for bound in (low, high))
        raise_for_row(rows, lower, upper, tolerance, refused)
    return probabilities


class TemperatureRows:
    """`p = BCSoftmax(g / temperature; lower, upper)` of float64 rows.

    `box`: lower and upper bound; None where they bound nothing.
    """

    def __init__(self, temperature: float, lower: float, upper: float, num_classes: int) -> None:
        self.box = None if lower <= 0.0 and upper >= 1.0 else (lower, upper)
        self._temperature = temperature
        self._box = np.array([lower]), np.array([upper])
        self._tolerance = sum_tolerance(num_classes)

    def __call__(self, logits: Array) -> tuple[Array, Array]:
        """Give probabilities and mapped logits (N, K) for logits (N, K), which lie row after row."""
        mapped = logits if self._temperature == 1.0 else logits / self._temperature
        return _solve(mapped, *self._box, self._tolerance), mapped

    def summarised(self, logits: Array) -> tuple[Array, Array, Array, Array]:
        """Give also the sum of the probabilities of each row (N,), and the largest of them (N,)."""
        mapped = logits if self._temperature == 1.0 else logits / self._temperature
        probabilities = np.empty_like(mapped)
        sums, largest = np.empty((2, len(mapped)))
        refused = _compiled_summary()(
            logits, mapped, *self._box, self._tolerance, probabilities, sums, largest
        )
        if refused >= 0:
            if not np.isfinite(logits[refused]).all():
                raise ValueError(f"row {refused} has a logit that is not finite")
            lower, upper = (bound[:, None] for bound in self._box)
            raise_for_row(mapped, lower, upper, self._tolerance, refused)
        return probabilities, mapped, sums, largest


def temperature_rows(logit_map: LogitMap, bound_map: BoxMap) -> TemperatureRows | None:
    """Give the short way through two maps; None where they are more than a temperature and a box."""
    if not isinstance(logit_map, IdentityMap | TemperatureScaling) or not isinstance(
        bound_map, ConstantBounds
    ):
        return None
    temperature = logit_map.parameters.get("temperature", np.ones(())).item()
    return TemperatureRows(temperature, *bound_map.pair, logit_map.num_classes)


def warm_arrays() -> None:
    """Call each compiled form that a service needs: the operator with one box or many, a ranking."""
    from boxcal.calibrators.operator.cpu_loops import most_probable  # noqa: PLC0415 - imports numba

    rows = np.zeros((2, 3))
    for upper in (np.full(1, 0.5), np.full(3, 0.5)):
        solve_rows(rows, np.zeros_like(upper), upper)
    TemperatureRows(1.0, 0.0, 1.0, 3).summarised(rows)
    most_probable(np.full(3, 1 / 3), np.full(3, 1 / 3), np.empty(2, np.int64))
