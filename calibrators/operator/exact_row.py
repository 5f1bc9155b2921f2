"""The CPU engine's careful form for one row: whatever the vectorised loops of `cpu_loops` give up on.

The same search as `torch_solver`, on plain numbers, with sums that lose nothing to cancellation.
"""

import math
from typing import Any

import numpy as np
from numba import njit

from calibrators.operator.torch_solver import AT_LOWER, AT_UPPER, FREE, MAX_PASSES, UNDERFLOW

Array = np.ndarray[Any, Any]

SOLVED = 0
REFUSED = 1
PLAIN = 2
"""Solved, and nothing else than a softmax."""


@njit(error_model="numpy")
def _two_sum(left: float, right: float) -> tuple[float, float]:
    """Add two numbers: their rounded sum, and what rounding lost (Knuth)."""
    total = left + right
    shadow = total - left
    return total, (left - (total - shadow)) + (right - shadow)


@njit(error_model="numpy")
def _add(high: float, middle: float, low: float, term: float) -> tuple[float, float, float]:
    """Add to an unevaluated sum of three numbers, which together keep about 160 bits."""
    high, lost = _two_sum(high, term)
    middle, lost = _two_sum(middle, lost)
    return high, middle, low + lost


@njit(error_model="numpy")
def _value(high: float, middle: float, low: float) -> float:
    """Round an unevaluated sum of three numbers to one."""
    total, lost = _two_sum(high, middle)
    return total + (lost + low)


@njit(error_model="numpy")
def _beyond_one(bound: Array) -> float:
    """By how much bounds add up to more than 1."""
    high, middle, low = -1.0, 0.0, 0.0
    for i in range(bound.shape[0]):
        high, middle, low = _add(high, middle, low, np.float64(bound[i]))
    return _value(high, middle, low)


@njit(error_model="numpy")
def _distances(row: Array, top: float, inverse: float) -> Array:
    """Scores below the largest; -inf lies so far below the rest that it weighs nothing, tied with itself."""
    distance = np.empty(row.shape[0])
    lowest = 0.0
    for i in range(row.shape[0]):
        distance[i] = (np.float64(row[i]) - np.float64(top)) * inverse
        if distance[i] > -math.inf:
            lowest = min(lowest, distance[i])
    for i in range(row.shape[0]):
        if distance[i] == -math.inf:
            distance[i] = lowest - UNDERFLOW
    return distance


@njit(error_model="numpy")
def _free_one(distance: Array, lower: Array, upper: Array, side: Array) -> None:
    """With no class free, free the one that loosened bounds would move first (all at a lower bound of 0)."""
    best, chosen = math.inf, -1
    for i in range(side.shape[0]):
        if side[i] == AT_LOWER and lower[i] < upper[i]:
            if lower[i] == 0.0:
                side[i] = FREE
                best, chosen = -math.inf, -1
            elif math.log(lower[i]) - distance[i] < best:
                best, chosen = math.log(lower[i]) - distance[i], i
    if best == math.inf:
        for i in range(side.shape[0]):
            if side[i] == AT_UPPER and lower[i] < upper[i] and distance[i] - math.log(upper[i]) < best:
                best, chosen = distance[i] - math.log(upper[i]), i
    if chosen >= 0:
        side[chosen] = FREE


@njit(error_model="numpy")
def _classify(  # noqa: PLR0917 - compiled loops take arrays by position
    distance: Array, lower: Array, upper: Array, anchor: float, scale: float, side: Array
) -> tuple[float, float, float, float, bool]:
    """Put every class on its side: the mass left to the free, their sum, largest and weight; any change."""
    high, middle, low, values, top = 1.0, 0.0, 0.0, 0.0, -math.inf
    changed = False
    for i in range(distance.shape[0]):
        value = math.exp(distance[i] - anchor) * scale
        now = FREE
        if value < lower[i] or (lower[i] == upper[i] and value <= upper[i]):
            now = AT_LOWER
            high, middle, low = _add(high, middle, low, -np.float64(lower[i]))
        elif value > upper[i]:
            now = AT_UPPER
            high, middle, low = _add(high, middle, low, -np.float64(upper[i]))
        else:
            values += value
            top = max(top, distance[i])
        changed |= now != side[i]
        side[i] = now
    weight = 0.0
    for i in range(distance.shape[0]):
        if side[i] == FREE:
            weight += math.exp(distance[i] - top)
    return _value(high, middle, low), values, top, weight, changed


@njit(error_model="numpy")
def solve_exactly(  # noqa: PLR0917 - one search; compiled loops take arrays by position
    row: Array,
    lower: Array,
    upper: Array,
    top: float,
    inverse: float,
    tolerance: float,
    probabilities: Array,
    side: Array,
) -> int:
    """Fill probabilities and side of one row of finite or -inf logits; refuse where the sums rule out 1."""
    classes = row.shape[0]
    low_over, high_over = _beyond_one(lower), _beyond_one(upper)
    if low_over > tolerance or high_over < -tolerance:
        return REFUSED
    distance = _distances(row, top, inverse)
    if low_over >= 0.0 or high_over <= 0.0:
        pinned, bound = (AT_LOWER, lower) if low_over >= 0.0 else (AT_UPPER, upper)
        for i in range(classes):
            probabilities[i] = bound[i]
            side[i] = pinned
        _free_one(distance, lower, upper, side)
        return SOLVED

    anchor, total, high_end = 0.0, 0.0, -math.inf
    for i in range(classes):
        side[i] = -1
        total += math.exp(distance[i])
        if upper[i] > 0.0:
            high_end = max(high_end, math.log(upper[i]) - distance[i])
    scale, low_end, by_newton = 1.0 / total, -UNDERFLOW, False
    for count in range(MAX_PASSES):
        mass, values, largest, weight, changed = _classify(distance, lower, upper, anchor, scale, side)
        excess = values - mass
        if excess == 0.0 or (by_newton and not changed):
            break
        log_scale = math.log(scale) - anchor
        if excess > 0.0:
            high_end = min(high_end, log_scale)
        else:
            low_end = max(low_end, log_scale)
        middle = 0.5 * (low_end + high_end)
        if middle <= low_end or middle >= high_end:
            break
        newton = math.log(mass / weight) - largest if weight > 0.0 and mass > 0.0 else math.nan
        by_newton = low_end <= newton <= high_end and not (count > 6 and count % 3 == 2)
        anchor, scale = (largest, mass / weight) if by_newton else (-middle, 1.0)
    free = False
    for i in range(classes):
        value = math.exp(distance[i] - anchor) * scale
        probabilities[i] = min(max(value, np.float64(lower[i])), np.float64(upper[i]))
        free |= side[i] == FREE
    if not free:
        _free_one(distance, lower, upper, side)
    return SOLVED
