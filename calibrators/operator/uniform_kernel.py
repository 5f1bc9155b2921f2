"""Compiled loops under `uniform`: running sums of sorted rows, and the search for the two cuts.

Importing this module costs what numba costs (about half a second), so only those that fit import it.
"""

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from calibrators.operator.compiling import compiled
from calibrators.operator.torch_solver import MAX_PASSES, UNDERFLOW, VERTEX

Floats = NDArray[np.float64]


@compiled
def running_sums(scores: Floats, sums: Floats) -> None:
    """Fill sums[n, j] with the sum over i <= j of exp(scores[n, i] - scores[n, j]), rows ascending."""
    for n in range(scores.shape[0]):
        sums[n, 0] = 1.0
        for j in range(1, scores.shape[1]):
            sums[n, j] = 1.0 + sums[n, j - 1] * math.exp(scores[n, j - 1] - scores[n, j])


@njit(error_model="numpy")
def _solve_row(scores: Floats, sums: Floats, lower: float, upper: float) -> tuple[float, int, int, float]:
    """Log of 1/Z, the first class above its lower bound, the first at its upper bound, and the free mass."""
    classes = scores.shape[0]
    log_lower = math.log(lower) if lower > 0.0 else -math.inf
    log_upper = math.log(upper)
    log_scale = -math.log(sums[classes - 1])
    if scores[0] + log_scale >= log_lower and log_scale <= log_upper:
        return log_scale, 0, classes, 1.0
    low_end, high_end = -UNDERFLOW, log_upper - scores[0]
    last_first, last_end, by_newton = -1, -1, False
    for count in range(MAX_PASSES):
        first = int(np.searchsorted(scores, log_lower - log_scale, side="left"))
        end = int(np.searchsorted(scores, log_upper - log_scale, side="right"))
        mass = 1.0 - first * lower - (classes - end) * upper
        if end > first:
            weight = sums[end - 1]
            if first > 0:
                weight -= sums[first - 1] * math.exp(scores[first - 1] - scores[end - 1])
            newton = math.log(mass / weight) - scores[end - 1] if mass > 0.0 else -math.inf
            excess = math.exp(log_scale + scores[end - 1]) * weight - mass
            if excess == 0.0 or (by_newton and first == last_first and end == last_end):
                break
        else:
            newton, excess = math.nan, -mass
            if abs(mass) <= VERTEX:
                break
        if excess > 0.0:
            high_end = min(high_end, log_scale)
        else:
            low_end = max(low_end, log_scale)
        middle = 0.5 * (low_end + high_end)
        if middle <= low_end or middle >= high_end:
            break
        by_newton = low_end <= newton <= high_end and not (count > 6 and count % 3 == 2)
        log_scale = newton if by_newton else middle
        last_first, last_end = first, end
    return log_scale, first, end, mass


@compiled
def label_log_probability(  # noqa: PLR0917 - compiled loops take arrays by position
    scores: Floats,
    sums: Floats,
    label_scores: Floats,
    lower: Floats,
    upper: Floats,
    value: Floats,
    by_lower: Floats,
    by_upper: Floats,
) -> None:
    """Fill each row's log-probability of its label and the derivatives in the row's bounds."""
    classes = scores.shape[1]
    for n in range(scores.shape[0]):
        a, b = lower[n], upper[n]
        by_lower[n] = 0.0
        by_upper[n] = 0.0
        if a * classes >= 1.0:
            value[n] = math.log(a)
            by_lower[n] = 1.0 / a
            continue
        if b * classes <= 1.0:
            value[n] = math.log(b)
            by_upper[n] = 1.0 / b
            continue
        log_scale, first, end, mass = _solve_row(scores[n], sums[n], a, b)
        log_p = label_scores[n] + log_scale
        if first > 0 and log_p < math.log(a):
            value[n] = math.log(a)
            by_lower[n] = 1.0 / a
        elif end < classes and log_p > math.log(b):
            value[n] = math.log(b)
            by_upper[n] = 1.0 / b
        else:
            value[n] = log_p
            if mass > 0.0:
                by_lower[n] = -first / mass
                by_upper[n] = -(classes - end) / mass
