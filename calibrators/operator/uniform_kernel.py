"""Compiled loops under `uniform`: running sums of sorted rows, and the search for the two cuts.

Importing this module costs what numba costs (about half a second), so only those that fit import it.
"""

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from boxcal.calibrators.operator.compiling import compiled
from boxcal.calibrators.operator.torch_solver import MAX_PASSES, UNDERFLOW, VERTEX

Floats = NDArray[np.float64]
Cuts = NDArray[np.int32]


@compiled
def running_sums(scores: Floats, sums: Floats) -> None:
    """Fill sums[n, j] with the sum over i <= j of exp(scores[n, i] - scores[n, j]), rows ascending."""
    for n in range(scores.shape[0]):
        sums[n, 0] = 1.0
        for j in range(1, scores.shape[1]):
            sums[n, j] = 1.0 + sums[n, j - 1] * math.exp(scores[n, j - 1] - scores[n, j])


@njit(error_model="numpy")
def _balance(  # noqa: PLR0917 - compiled loops take arrays by position
    scores: Floats, sums: Floats, first: int, end: int, lower: float, upper: float
) -> tuple[float, float]:
    """Mass that the two bounds leave, and the log of 1/Z at which the classes between the cuts take it."""
    mass = 1.0 - first * lower - (scores.shape[0] - end) * upper
    if mass <= 0.0:
        return mass, -math.inf
    weight = sums[end - 1]
    if first > 0:
        weight -= sums[first - 1] * math.exp(scores[first - 1] - scores[end - 1])
    return mass, math.log(mass / weight) - scores[end - 1]


@njit(error_model="numpy")
def _cut(scores: Floats, threshold: float, guess: int) -> int:
    """First class whose score is not below the threshold, looked for in growing steps from a guess."""
    classes = scores.shape[0]
    low, high, step = guess, guess, 1
    while low > 0 and scores[low - 1] >= threshold:
        high = low - 1
        low = max(0, low - step)
        step *= 2
    while high < classes and scores[high] < threshold:
        low = high + 1
        high = min(classes, high + step)
        step *= 2
    while low < high:
        middle = (low + high) // 2
        if scores[middle] < threshold:
            low = middle + 1
        else:
            high = middle
    return low


@njit(error_model="numpy")
def solve_row(  # noqa: PLR0917 - as above
    scores: Floats,
    sums: Floats,
    lower: float,
    upper: float,
    log_lower: float,
    log_upper: float,
    first: int,
    end: int,
) -> tuple[float, int, int, float]:
    """Log of 1/Z, the first class above its lower bound, the first at its upper bound, and the free mass.

    `first` and `end` are where the cuts may lie: with those of bounds nearby, one look confirms the answer.
    """
    classes = scores.shape[0]
    low_end, high_end = -UNDERFLOW, log_upper - scores[0]
    log_scale, mass, by_newton = -math.log(sums[classes - 1]), 1.0, False
    if end > first:
        mass, newton = _balance(scores, sums, first, end, lower, upper)
        if low_end <= newton <= high_end:
            log_scale, by_newton = newton, True
    last_first, last_end = first, end
    for count in range(MAX_PASSES):
        first = _cut(scores, log_lower - log_scale, first)
        end = max(first, _cut(scores, log_upper - log_scale, end))
        if by_newton and first == last_first and end == last_end:
            break
        mass, newton = 1.0 - first * lower - (classes - end) * upper, math.nan
        if end > first:
            mass, newton = _balance(scores, sums, first, end, lower, upper)
            too_high = log_scale >= newton
            if log_scale == newton:
                break
        else:
            too_high = mass <= 0.0
            if abs(mass) <= VERTEX:
                break
        if too_high:
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
def label_log_probability(  # noqa: PLR0917 - as above
    scores: Floats,
    sums: Floats,
    label_scores: Floats,
    lower: Floats,
    upper: Floats,
    cuts: Cuts,
    value: Floats,
    by_lower: Floats,
    by_upper: Floats,
) -> None:
    """Fill each row's log-probability of its label and the derivatives in the row's bounds.

    `cuts` (N, 2) holds where the last call found the cuts of each row, and is brought up to date.
    """
    classes = scores.shape[1]
    a, b, log_a, log_b = 0.0, 1.0, -math.inf, 0.0
    for n in range(scores.shape[0]):
        if lower[n] != a:
            a = lower[n]
            log_a = math.log(a) if a > 0.0 else -math.inf
        if upper[n] != b:
            b = upper[n]
            log_b = math.log(b)
        by_lower[n] = 0.0
        by_upper[n] = 0.0
        if a * classes >= 1.0:
            value[n] = log_a
            by_lower[n] = 1.0 / a
            continue
        if b * classes <= 1.0:
            value[n] = log_b
            by_upper[n] = 1.0 / b
            continue
        log_scale = -math.log(sums[n, classes - 1])
        if scores[n, 0] + log_scale >= log_a and log_scale <= log_b:
            value[n] = label_scores[n] + log_scale
            continue
        log_scale, first, end, mass = solve_row(
            scores[n], sums[n], a, b, log_a, log_b, cuts[n, 0], cuts[n, 1]
        )
        cuts[n, 0], cuts[n, 1] = first, end
        log_p = label_scores[n] + log_scale
        if first > 0 and log_p < log_a:
            value[n] = log_a
            by_lower[n] = 1.0 / a
        elif end < classes and log_p > log_b:
            value[n] = log_b
            by_upper[n] = 1.0 / b
        else:
            value[n] = log_p
            if mass > 0.0:
                by_lower[n] = -first / mass
                by_upper[n] = -(classes - end) / mass
