"""The CPU engine's careful form for one row: whatever the vectorised loops of `cpu_loops` give up on.

The same search as `torch_solver`, on plain numbers, with sums that lose nothing to cancellation. Like there,
a scale 1/Z is kept as a pair (anchor, scale), which stands for scale · exp(-anchor / temperature): finite
logits of any size keep the digits of their differences.
"""

import math
from typing import Any

import numpy as np
from numba import njit

from boxcal.calibrators.operator.torch_solver import (
    AT_LOWER,
    AT_UPPER,
    FREE,
    LAST_STEPS,
    MAX_PASSES,
    STRIDE,
    UNDERFLOW,
)

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
def _halves(row: Array, inverse: float) -> Array:
    """Half of every logit, so that no difference overflows; -inf so far below that it weighs nothing.

    Classes of -inf are tied with each other.
    """
    halves = np.empty(row.shape[0])
    lowest = math.inf
    for i in range(row.shape[0]):
        halves[i] = 0.5 * np.float64(row[i])
        if halves[i] > -math.inf:
            lowest = min(lowest, halves[i])
    below = min(lowest - 0.5 * UNDERFLOW / inverse, np.nextafter(lowest, -math.inf))
    for i in range(row.shape[0]):
        halves[i] = max(halves[i], below)
    return halves


@njit(error_model="numpy")
def _free_one(halves: Array, lower: Array, upper: Array, rate: float, side: Array) -> None:
    """With no class free, free the one that loosened bounds would move first (all at a lower bound of 0)."""
    chosen, rising = -1, False
    for i in range(side.shape[0]):
        if side[i] == AT_LOWER and lower[i] < upper[i]:
            rising = True
            if lower[i] == 0.0:
                side[i] = FREE
                chosen = -2
            elif chosen == -1 or (
                chosen >= 0 and _is_above(halves[chosen], lower[chosen], halves[i], lower[i], rate)
            ):
                chosen = i
    if not rising:
        for i in range(side.shape[0]):
            if (
                side[i] == AT_UPPER
                and lower[i] < upper[i]
                and (chosen < 0 or _is_above(halves[i], upper[i], halves[chosen], upper[chosen], rate))
            ):
                chosen = i
    if chosen >= 0:
        side[chosen] = FREE


@njit(error_model="numpy")
def _is_above(anchor: float, scale: float, other_anchor: float, other_scale: float, rate: float) -> bool:
    """Whether the first pair of anchor and scale stands for more than the second."""
    return math.log(np.float64(scale)) - math.log(np.float64(other_scale)) > (anchor - other_anchor) * rate


@njit(error_model="numpy")
def _classify(  # noqa: PLR0917 - compiled loops take arrays by position
    halves: Array, lower: Array, upper: Array, rate: float, anchor: float, scale: float, side: Array
) -> tuple[float, float, float, float, bool, bool]:
    """Put every class on its side: mass left to the free, what they have beyond it, their largest and weight.

    What is beyond is summed without loss: where bounds alone add up to 1, a class of almost no mass decides
    how far the search goes on. The last answers are whether any class changed sides, and whether a free one
    is on the very bound that takes hold of it when the search goes on.
    """
    high, middle, low, top = 1.0, 0.0, 0.0, -math.inf
    whole, part, rest = 0.0, 0.0, 0.0
    changed = on_lower = on_upper = False
    for i in range(halves.shape[0]):
        value = math.exp((halves[i] - anchor) * rate) * scale
        now = FREE
        if value < lower[i] or (lower[i] == upper[i] and value <= upper[i]):
            now = AT_LOWER
            high, middle, low = _add(high, middle, low, -np.float64(lower[i]))
        elif value > upper[i]:
            now = AT_UPPER
            high, middle, low = _add(high, middle, low, -np.float64(upper[i]))
        else:
            whole, part, rest = _add(whole, part, rest, value)
            top = max(top, halves[i])
            on_lower |= value == lower[i] > 0.0
            on_upper |= value == upper[i]
        changed |= now != side[i]
        side[i] = now
    weight = 0.0
    for i in range(halves.shape[0]):
        if side[i] == FREE:
            weight += math.exp((halves[i] - top) * rate)
    mass = _value(high, middle, low)
    for term in (-high, -middle, -low):
        whole, part, rest = _add(whole, part, rest, term)
    excess = _value(whole, part, rest)
    return mass, excess, top, weight, changed, (excess > 0.0 and on_lower) or (excess < 0.0 and on_upper)


@njit(error_model="numpy")
def _pick(  # noqa: PLR0917 - compiled loops take arrays by position
    halves: Array,
    lower: Array,
    upper: Array,
    rate: float,
    floor: tuple[float, float],
    ceiling: tuple[float, float],
    count: int,
) -> tuple[float, float]:
    """Find a pair between two at which a class meets one of its bounds; its scale is 0 if there is none.

    Which class depends on the count of passes: no order of the classes makes every pick a bad one.
    """
    inside = 0
    for attempt in range(2):
        wanted = STRIDE * count % max(inside, 1) if attempt else -1
        inside = 0
        for i in range(halves.shape[0]):
            for bound in (np.float64(lower[i]), np.float64(upper[i])):
                if (
                    bound > 0.0
                    and (floor[1] == 0.0 or _is_above(halves[i], bound, floor[0], floor[1], rate))
                    and (ceiling[1] == 0.0 or _is_above(ceiling[0], ceiling[1], halves[i], bound, rate))
                ):
                    if inside == wanted:
                        return halves[i], bound
                    inside += 1
    return 0.0, 0.0


@njit(error_model="numpy")
def _search(halves: Array, lower: Array, upper: Array, rate: float, side: Array) -> tuple[float, float]:
    """Find the pair of anchor and scale at which the sum is 1, where the bounds leave room for it.

    Newton's steps inside a bracket; where one leaves it, the point at which some class inside meets a bound.
    With none left the sum is linear, and Newton's next steps are the last ones.
    """
    anchor, total = halves.max(), 0.0
    for i in range(halves.shape[0]):
        side[i] = -1
        total += math.exp((halves[i] - anchor) * rate)
    scale, by_newton, last_steps = 1.0 / total, False, 0
    floor, ceiling = (0.0, 0.0), (0.0, 0.0)
    for count in range(MAX_PASSES):
        mass, excess, largest, weight, changed, on_edge = _classify(
            halves, lower, upper, rate, anchor, scale, side
        )
        if excess == 0.0 or (by_newton and not changed and not on_edge):
            break
        if excess > 0.0:
            ceiling = anchor, scale
        else:
            floor = anchor, scale
        step = mass / weight if weight > 0.0 else 0.0
        by_newton = (
            step > 0.0
            and not on_edge
            and not (count > 6 and count % 3 == 2)
            and not (floor[1] > 0.0 and _is_above(floor[0], floor[1], largest, step, rate))
            and not (ceiling[1] > 0.0 and _is_above(largest, step, ceiling[0], ceiling[1], rate))
        )
        if not by_newton:
            met, bound = _pick(halves, lower, upper, rate, floor, ceiling, count)
            if bound > 0.0:
                anchor, scale = met, bound
                continue
            if step <= 0.0 or last_steps == LAST_STEPS:
                break
            last_steps += 1
            by_newton = True
        anchor, scale = largest, step
    return anchor, scale


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
    """Fill probabilities and side of one row of finite or -inf logits; refuse where the sums rule out 1."""
    low_over, high_over = _beyond_one(lower), _beyond_one(upper)
    if low_over > tolerance or high_over < -tolerance:
        return REFUSED
    halves, rate = _halves(row, inverse), min(2.0 * inverse, np.finfo(np.float64).max)
    if low_over >= 0.0 or high_over <= 0.0:
        pinned, bound = (AT_LOWER, lower) if low_over >= 0.0 else (AT_UPPER, upper)
        for i in range(row.shape[0]):
            probabilities[i] = bound[i]
            side[i] = pinned
        _free_one(halves, lower, upper, rate, side)
        return SOLVED
    anchor, scale = _search(halves, lower, upper, rate, side)
    free = False
    for i in range(row.shape[0]):
        value = math.exp((halves[i] - anchor) * rate) * scale
        probabilities[i] = min(max(value, np.float64(lower[i])), np.float64(upper[i]))
        free |= side[i] == FREE
    if not free:
        _free_one(halves, lower, upper, rate, side)
    return SOLVED
