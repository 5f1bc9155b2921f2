"""The compiled engine on arrays, and the short way for calibrators that are one temperature and one box.

A handful of rows costs less than the tensor operations around them. `Calibrator.calibrate` goes the short
way, and so does `ArrayCalibrator`: the answers are the same to the last bit. Nothing here needs torch.
"""

from __future__ import annotations

import logging
import math
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
NO_SUMS = np.empty(0)
NO_TEAM = 0, 1
INVERSE = np.ones(1)
"""The temperature is the logit map's; the operator's own is 1."""


def solve_rows(logits: Array, lower: Array, upper: Array) -> Array:
    """Give the box-constrained softmax of rows (N, K), for bounds that broadcast to them."""
    return _solve(*_laid_out(logits, lower, upper))


def _laid_out(logits: Array, lower: Array, upper: Array) -> tuple[Array, Array, Array, float]:
    """Lay out rows and bounds as the loop reads them, which also fixes the form that is compiled."""
    rows = np.ascontiguousarray(logits)
    if lower.shape[-1:] in ((), (1,)) and upper.shape[-1:] in ((), (1,)):
        shape: tuple[int, ...] = (max(lower.size, upper.size),)
    else:
        shape = (max(_height(lower), _height(upper)), rows.shape[1])
    low, high = (_filled(bound, shape) for bound in (lower, upper))
    return rows, low, high, sum_tolerance(rows.shape[1])


def _filled(bound: Array, shape: tuple[int, ...]) -> Array:
    """Give a bound its shape; a copy where it is read-only, for which numba would compile the loop anew."""
    own = bound.reshape(-1) if len(shape) == 1 else bound
    own = own.reshape(shape) if own.size == math.prod(shape) else np.broadcast_to(own, shape)
    return own if own.flags.c_contiguous and own.flags.writeable else own.copy()


def _height(bound: Array) -> int:
    return len(bound) if bound.ndim == 2 else 1


@cache
def _compiled_loop() -> Callable[..., int]:
    from boxcal.calibrators.operator.cpu_loops import forward_rows  # noqa: PLC0415 - numba loads when needed

    return forward_rows


@cache
def _compiled_softmax() -> Callable[..., int]:
    from boxcal.calibrators.operator.cpu_loops import softmax_rows  # noqa: PLC0415 - as above

    return softmax_rows


@cache
def _compiled_sums() -> Callable[..., int]:
    from boxcal.calibrators.operator.cpu_loops import sums_of_rows  # noqa: PLC0415 - as above

    return sums_of_rows


def _solve(rows: Array, low: Array, high: Array, tolerance: float) -> Array:
    probabilities = np.empty_like(rows)
    refused = _compiled_loop()(rows, low, high, INVERSE, tolerance, probabilities, NO_SIDE, NO_HELD, NO_TEAM)
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
        if self.box is not None:
            return _solve(mapped, *self._box, self._tolerance), mapped
        return self._softmax(mapped[:0], mapped, NO_SUMS, NO_SUMS), mapped

    def summarised(self, logits: Array) -> tuple[Array, Array, Array, Array]:
        """Give also the sum of the probabilities of each row (N,), and the largest of them (N,)."""
        mapped = logits if self._temperature == 1.0 else logits / self._temperature
        sums, largest = np.empty((2, len(mapped)))
        if self.box is None:
            return self._softmax(logits, mapped, sums, largest), mapped, sums, largest
        probabilities = _solve(mapped, *self._box, self._tolerance)
        _check_given(logits, _compiled_sums()(logits, probabilities, sums, largest))
        return probabilities, mapped, sums, largest

    def _softmax(self, given: Array, mapped: Array, sums: Array, largest: Array) -> Array:
        probabilities = np.empty_like(mapped)
        refused = _compiled_softmax()(given, mapped, probabilities, sums, largest)
        if refused >= 0:
            _check_given(given, refused)
            lower, upper = (bound[:, None] for bound in self._box)
            raise_for_row(mapped, lower, upper, self._tolerance, refused)
        return probabilities


def _check_given(logits: Array, refused: int) -> None:
    if refused >= 0 and not np.isfinite(logits[refused : refused + 1]).all():
        raise ValueError(f"row {refused} has a logit that is not finite")


def temperature_rows(logit_map: LogitMap, bound_map: BoxMap) -> TemperatureRows | None:
    """Give the short way through two maps; None where they are more than a temperature and a box."""
    if not isinstance(logit_map, IdentityMap | TemperatureScaling) or not isinstance(
        bound_map, ConstantBounds
    ):
        return None
    temperature = logit_map.parameters.get("temperature", np.ones(())).item()
    return TemperatureRows(temperature, *bound_map.pair, logit_map.num_classes)


ROWS = np.zeros((2, 3))
BOXES = (np.zeros(1), np.full(1, 0.5)), (np.zeros(3), np.full(3, 0.5))
"""One box for all classes, and one for each: the forms in which a service needs the solver."""


def warm_softmax() -> None:
    """Call the compiled forms of answers that no bound holds: a softmax with its sums, a ranking."""
    from boxcal.calibrators.operator.cpu_loops import most_probable  # noqa: PLC0415 - imports numba

    TemperatureRows(1.0, 0.0, 1.0, 3).summarised(ROWS)
    most_probable(np.full(3, 1 / 3), np.full(3, 1 / 3), np.empty(2, np.int64))


def warm_arrays() -> None:
    """Call each compiled form that a service needs: also the solver."""
    warm_softmax()
    TemperatureRows(1.0, 0.0, 0.5, 3).summarised(ROWS)
    for box in BOXES:
        solve_rows(ROWS, *box)


def solver_can_be_kept() -> bool:
    """Whether another process can compile the solver for this one."""
    from boxcal.calibrators.operator.compiling import can_be_kept  # noqa: PLC0415 - imports numba

    return can_be_kept(_compiled_loop())


def solver_is_kept() -> bool:
    """Whether the solver was compiled before for this processor, so that `warm_arrays` loads it at once."""
    from boxcal.calibrators.operator.compiling import is_kept  # noqa: PLC0415 - as above

    loop = _compiled_loop()
    return all(
        is_kept(loop, rows, low, high, INVERSE, tolerance, rows, NO_SIDE, NO_HELD, NO_TEAM)
        for rows, low, high, tolerance in (_laid_out(ROWS, *box) for box in BOXES)
    )


if __name__ == "__main__":
    logging.getLogger("boxcal.compiling").setLevel(logging.ERROR)  # that it compiles is no news
    warm_arrays()
