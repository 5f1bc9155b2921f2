"""The CPU engine's careful form for one row: whatever the vectorised loops of `cpu_loops` do not solve.

It is the algorithm of `torch_solver` with sums that lose nothing to cancellation.
"""

import math
from typing import Any

import numpy as np
from numba import njit

from boxcal.calibrators.operator.constants import AT_LOWER, AT_UPPER, FREE, UNDERFLOW

Array = np.ndarray[Any, Any]
Sum = tuple[float, float, float]
"""An unevaluated sum of three numbers, which together keep about 160 bits."""

SOLVED, REFUSED, PLAIN = 0, 1, 2
"""Outcomes of a row; `PLAIN` is solved, and a softmax that obeys its bounds."""


@njit(error_model="numpy")
def _two_sum(left: float, right: float) -> tuple[float, float]:
    """Add two numbers: their rounded sum, and what rounding lost (Knuth)."""
    total = left + right
    shadow = total - left
    return total, (left - (total - shadow)) + (right - shadow)


@njit(error_model="numpy")
def _add(total: Sum, term: float) -> Sum:
    """Add a number to an unevaluated sum."""
    high, lost = _two_sum(total[0], term)
    middle, lost = _two_sum(total[1], lost)
    return high, middle, total[2] + lost


@njit(error_model="numpy")
def _value(total: Sum) -> float:
    """Round an unevaluated sum to one number."""
    high, lost = _two_sum(total[0], total[1])
    return high + (lost + total[2])


@njit(error_model="numpy")
def _beyond_one(bound: Array) -> float:
    """By how much bounds add up to more than 1."""
    total = (-1.0, 0.0, 0.0)
    for i in range(bound.shape[0]):
        total = _add(total, np.float64(bound[i]))
    return _value(total)


@njit(error_model="numpy")
def _halves(row: Array, inverse: float) -> Array:
    """Half of every logit; -inf is placed so far below the others that it weighs nothing."""
    halves: Array = 0.5 * row
    lowest = math.inf
    for half in halves:
        if half > -math.inf:
            lowest = min(lowest, half)
    below = min(lowest - 0.5 * UNDERFLOW / inverse, np.nextafter(lowest, -math.inf))
    placed: Array = np.maximum(halves, below)
    return placed


@njit(error_model="numpy")
def _is_before(keys: Array, left: int, right: int) -> bool:
    """Whether a column of keys (3, n) is less than another: what rounding tied, by what rounding lost."""
    for key in range(keys.shape[0]):
        if keys[key, left] != keys[key, right]:
            return bool(keys[key, left] < keys[key, right])
    return False


@njit(error_model="numpy")
def _sorted(keys: Array) -> Array:
    """Order the columns of keys (3, n), by the method of Shell: that of NumPy takes seconds to compile."""
    count, gap = keys.shape[1], 1
    order = np.arange(count)
    while 3 * gap < count:
        gap = 3 * gap + 1
    while gap > 0:
        for end in range(gap, count):
            place, point = end, order[end]
            while place >= gap and _is_before(keys, point, order[place - gap]):
                order[place] = order[place - gap]
                place -= gap
            order[place] = point
        gap //= 3
    return order


@njit(error_model="numpy")
def _points(halves: Array, lower: Array, upper: Array, rate: float) -> tuple[Array, Array]:
    """Pairs of anchor and scale at which a class meets a bound above 0, in ascending order of their λ."""
    size, count, top = halves.shape[0], 0, halves.max()
    anchors, scales, keys = np.empty(2 * size), np.empty(2 * size), np.empty((3, 2 * size))
    for i in range(size):
        for bound in (np.float64(lower[i]), np.float64(upper[i])):
            if bound > 0.0:
                anchors[count], scales[count] = halves[i], bound
                far, near = _two_sum(top, -halves[i])
                high, lost = _two_sum(far, math.log(bound) / rate)
                middle, keys[2, count] = _two_sum(near, lost)
                keys[0, count], keys[1, count] = _two_sum(high, middle)
                count += 1
    order = _sorted(keys[:, :count])
    return anchors[order], scales[order]


@njit(error_model="numpy")
def _split(  # noqa: PLR0917 - compiled loops take arrays by position
    halves: Array, lower: Array, upper: Array, rate: float, anchor: float, scale: float, side: Array
) -> tuple[float, float]:
    """Mark which bound holds each class at this λ; return the mass left to the free ones, and the sum - 1."""
    mass, excess = (1.0, 0.0, 0.0), (-1.0, 0.0, 0.0)
    for i in range(halves.shape[0]):
        value = math.exp((halves[i] - anchor) * rate) * scale if scale > 0.0 else 0.0
        side[i], term = FREE, value
        if value < lower[i]:
            side[i], term = AT_LOWER, np.float64(lower[i])
        elif value >= upper[i]:
            side[i], term = AT_UPPER, np.float64(upper[i])
        excess = _add(excess, term)
        if side[i] != FREE:
            mass = _add(mass, -term)
    return _value(mass), _value(excess)


@njit(error_model="numpy")
def _is_too_low(  # noqa: PLR0917 - as above
    halves: Array, lower: Array, upper: Array, rate: float, anchor: float, scale: float, side: Array
) -> bool:
    """Whether the sum is at most 1 at this λ; it is added with all digits only where that may matter."""
    total = 0.0
    for i in range(halves.shape[0]):
        total += min(max(math.exp((halves[i] - anchor) * rate) * scale, lower[i]), upper[i])
    if abs(total - 1.0) > 1e-9:
        return total < 1.0
    return _split(halves, lower, upper, rate, anchor, scale, side)[1] <= 0.0


@njit(error_model="numpy")
def _free_one(halves: Array, lower: Array, upper: Array, rate: float, side: Array) -> None:
    """With no class free, free the one that looser bounds would move first (all at a lower bound of 0)."""
    chosen, any_rises, any_freed = -1, False, False
    for which, bounds, sign in ((AT_LOWER, lower, 1.0), (AT_UPPER, upper, -1.0)):
        for i in range(side.shape[0]):
            if side[i] != which or lower[i] >= upper[i] or (any_rises and sign < 0.0):
                continue
            any_rises |= sign > 0.0
            if bounds[i] == 0.0:
                side[i], any_freed = FREE, True
            elif chosen < 0:
                chosen = i
            else:
                apart = math.log(np.float64(bounds[i])) - math.log(np.float64(bounds[chosen]))
                if sign * (apart - (halves[i] - halves[chosen]) * rate) < 0.0:
                    chosen = i
    if chosen >= 0 and not any_freed:
        side[chosen] = FREE


@njit(error_model="numpy")
def _is_above(pair: tuple[float, float], other: tuple[float, float], rate: float) -> bool:
    """Whether the λ of one pair is larger than that of another."""
    return math.log(pair[1]) - math.log(other[1]) > (pair[0] - other[0]) * rate


@njit(error_model="numpy")
def _search(halves: Array, lower: Array, upper: Array, rate: float, side: Array) -> tuple[float, float]:
    """Find the pair of anchor and scale at which the sum is 1; its scale is 0 where no free class has mass.

    Points closer than rounding may be out of order, so the sides are taken in the middle of the piece found.
    """
    anchors, scales = _points(halves, lower, upper, rate)
    first, last = 0, anchors.shape[0]
    while first < last:
        middle = (first + last) // 2
        if _is_too_low(halves, lower, upper, rate, anchors[middle], scales[middle], side):
            first = middle + 1
        else:
            last = middle
    left = (anchors[first - 1], scales[first - 1]) if first > 0 else (halves.max(), 0.0)
    right = (anchors[first], scales[first]) if first < anchors.shape[0] else left
    if _split(halves, lower, upper, rate, left[0], left[1], side)[1] == 0.0:
        return left
    anchor, scale = 0.5 * (left[0] + right[0]), math.sqrt(left[1]) * math.sqrt(right[1])
    mass = _split(halves, lower, upper, rate, anchor, scale, side)[0]
    top, weight = -math.inf, 0.0
    for i in range(halves.shape[0]):
        if side[i] == FREE:
            top = max(top, halves[i])
    for i in range(halves.shape[0]):
        if side[i] == FREE:
            weight += math.exp((halves[i] - top) * rate)
    if weight == 0.0:
        return anchor, 0.0
    root = (top, mass / weight)
    if _is_above(left, root, rate):
        return left
    return right if _is_above(root, right, rate) else root


@njit(error_model="numpy")
def solve_exactly(  # noqa: PLR0917 - compiled loops take arrays by position
    row: Array,
    lower: Array,
    upper: Array,
    inverse: float,
    tolerance: float,
    probabilities: Array,
    side: Array,
) -> int:
    """Fill probabilities and side of one row of finite or -inf logits; refuse where the sums rule out 1.

    Arrays (K,) of float64, and of int8 for the sides.
    """
    low_over, high_over = _beyond_one(lower), _beyond_one(upper)
    if low_over > tolerance or high_over < -tolerance:
        return REFUSED
    halves, rate = _halves(row, inverse), min(2.0 * inverse, np.finfo(np.float64).max)
    if low_over >= 0.0 or high_over <= 0.0:
        side[:] = AT_LOWER if low_over >= 0.0 else AT_UPPER
        anchor, scale = 0.0, 0.0
    else:
        anchor, scale = _search(halves, lower, upper, rate, side)
    free = False
    for i in range(row.shape[0]):
        low, high = np.float64(lower[i]), np.float64(upper[i])
        if scale > 0.0:
            value = math.exp((halves[i] - anchor) * rate) * scale
            is_under = value < low or (low == high and value <= high)
            side[i] = AT_LOWER if is_under else AT_UPPER if value > high else FREE
            probabilities[i] = min(max(value, low), high)
        else:
            probabilities[i] = low if side[i] != AT_UPPER else high
        free |= side[i] == FREE
    if not free:
        _free_one(halves, lower, upper, rate, side)
    return SOLVED
