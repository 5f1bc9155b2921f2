"""The fused loops of the CPU engine: one row at a time, while it lies in the nearest cache.

`cpu_kernel` hands arrays down; `exact_row` takes the few rows that these loops give up on. All are serial and
release the interpreter's lock, so that any number of threads may be inside them.
"""

import math
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from boxcal.calibrators.operator.compiling import compiled
from boxcal.calibrators.operator.constants import AT_LOWER, AT_UPPER, FREE
from boxcal.calibrators.operator.cpu_math import bits, fast_exp, from_bits, ordered, select
from boxcal.calibrators.operator.exact_row import PLAIN, REFUSED, SOLVED, Array, solve_exactly

SUMMING = {"contract", "reassoc", "nsz"}
"""Let sums be split over vector lanes; NaN and infinity keep their meaning."""

MAX_STEPS = 24
"""Newton passes and new anchors before a row goes to `exact_row`; common rows take 2 to 6."""


NEAR_TIES = 6
"""After so many passes, classes within rounding of a bound may be what keeps the scale moving."""

SHRINK = 0.25
"""How far to step where bounds hold every class and nothing brackets the scale: down, or its inverse up."""

FAR = 1e4
"""Distance in units of the temperature that stands for all that are larger: infinity times 0 would be NaN."""

EXTREME = 1e30
"""Temperatures beyond this, or below its inverse, lie outside of what float32 multiplies: for `exact_row`."""

CLOSE_CALL = 64
"""Rounding moves an ulp or two of the mass of classes near their bounds; who has 1/64 of it may feel that."""

LEAST_MASS = 1e-6
"""Below so little free mass, what cancels in 1 - (held mass) matters: `exact_row` adds without loss."""

Bound = float | Array
"""One bound for the whole row, or one for each class; every loop is compiled for both."""


def _at(bound: Bound, i: int) -> float:
    """Bound of class i."""
    raise NotImplementedError


@overload(_at)
def _at_overload(bound, i):  # type: ignore[no-untyped-def]
    return (lambda bound, i: bound[i]) if isinstance(bound, types.Array) else (lambda bound, i: bound)


@njit(error_model="numpy")
def own(n: int, values: Array) -> int:
    """Where row n finds its own among values of which a single one may stand for all rows."""
    return n if values.shape[0] > 1 else 0


def _of_row(bounds: Array, n: int) -> Bound:
    """Bounds of row n, where a single row stands for all."""
    raise NotImplementedError


@overload(_of_row)
def _of_row_overload(bounds, n):  # type: ignore[no-untyped-def]
    return lambda bounds, n: bounds[own(n, bounds)]


def _as_row(bound: Bound, row: Array) -> Array:
    """Bounds as an array as long as the row."""
    raise NotImplementedError


@overload(_as_row)
def _as_row_overload(bound, row):  # type: ignore[no-untyped-def]
    if isinstance(bound, types.Array):
        return lambda bound, row: bound
    return lambda bound, row: np.full(row.shape[0], bound)


def _holds(lower: Bound, upper: Bound, smallest: float, largest: float) -> bool:
    """Whether a plain softmax obeys its bounds, where two numbers tell."""
    raise NotImplementedError


@overload(_holds)
def _holds_overload(lower, upper, smallest, largest):  # type: ignore[no-untyped-def]
    if isinstance(lower, types.Array):
        return lambda lower, upper, smallest, largest: False
    return lambda lower, upper, smallest, largest: lower <= smallest and largest <= upper


def _is_box(lower: Bound, upper: Bound) -> bool:
    """Whether 0 <= lower <= upper <= 1 for every class; NaN is not."""
    raise NotImplementedError


@overload(_is_box)
def _is_box_overload(lower, upper):  # type: ignore[no-untyped-def]
    def whole(lower, upper):  # type: ignore[no-untyped-def]
        inside = True
        for i in range(lower.shape[0]):
            inside &= (lower[i] >= 0) & (lower[i] <= upper[i]) & (upper[i] <= 1)
        return inside

    if isinstance(lower, types.Array):
        return whole
    return lambda lower, upper: 0 <= lower <= upper <= 1


@njit(error_model="numpy")
def _largest_scale(weights: Array) -> float:
    """How far 1/Z may rise before the weights have lost the digits that matter, and want a new anchor."""
    return 1.0 if weights.itemsize == 4 else 1e100


@njit(error_model="numpy")
def _extremes(row: Array) -> tuple[float, float]:
    """Largest and smallest entry; NaN or infinity where an entry is."""
    high = ordered(bits(row[0]))
    low = high
    for i in range(1, row.shape[0]):
        value = ordered(bits(row[i]))
        high = select(value > high, value, high)
        low = select(value < low, value, low)
    return from_bits(ordered(high)), from_bits(ordered(low))


@njit(error_model="numpy")
def _rate(inverse: float, row: Array) -> tuple[Any, Any, Any]:
    """One over the temperature as two numbers of the row's dtype, with the digits of float64; and -`FAR`."""
    high = row.dtype.type(inverse)
    return high, row.dtype.type(inverse - np.float64(high)), row.dtype.type(-FAR / inverse)


@njit(error_model="numpy", fastmath=SUMMING)
def _exponential(logit: Any, anchor: Any, rate: tuple[Any, Any, Any]) -> Any:
    """Compute exp((logit - anchor) / temperature)."""
    high, low, far = rate
    distance = logit - anchor
    distance = select(distance < far, far, distance)
    return fast_exp(distance * high + distance * low)


@njit(error_model="numpy", fastmath=SUMMING)
def _exponentials(row: Array, anchor: float, inverse: float, weights: Array) -> float:
    """Fill weights with exp((row - anchor) / temperature) and return their sum."""
    rate = _rate(inverse, row)
    for i in range(row.shape[0]):
        weights[i] = _exponential(row[i], anchor, rate)
    total = 0.0
    for i in range(row.shape[0]):
        total += np.float64(weights[i])
    return total


@njit(error_model="numpy", fastmath=SUMMING)
def _split(weights: Array, lower: Bound, upper: Bound, scale: float) -> tuple[float, float]:
    """At this scale: the mass that bounds hold, and the weight of the classes that they leave free."""
    zero, held, free = weights.dtype.type(0), 0.0, 0.0
    for i in range(weights.shape[0]):
        weight, low, high = weights[i], _at(lower, i), _at(upper, i)
        value = weight * scale
        clipped = select(value > low, value, low)
        clipped = select(clipped < high, clipped, high)
        is_free = clipped == value
        held += np.float64(select(is_free, zero, clipped))
        free += np.float64(select(is_free, weight, zero))
    return held, free


@njit(error_model="numpy")
def _largest_free(row: Array, weights: Array, lower: Bound, upper: Bound, scale: float) -> Any:
    """Largest logit of a class that no bound holds at this scale."""
    largest = row.dtype.type(-np.inf)
    for i in range(row.shape[0]):
        value = weights[i] * scale
        is_free = (value >= _at(lower, i)) & (value <= _at(upper, i))
        largest = select(is_free & (row[i] > largest), row[i], largest)
    return largest


@njit(error_model="numpy", fastmath=SUMMING)
def _is_close_call(weights: Array, lower: Bound, upper: Bound, scale: float) -> bool:
    """Whether classes within rounding of a bound outweigh those well inside their bounds.

    Which side the former are on then decides about the latter, and takes more digits to tell.
    """
    zero, rounding = weights.dtype.type(0), weights.dtype.type(4 * np.finfo(weights.dtype).eps)
    close, inside = zero, zero
    for i in range(weights.shape[0]):
        low, high = _at(lower, i), _at(upper, i)
        value = weights[i] * scale
        near = (abs(value - low) <= rounding * low) | (abs(value - high) <= rounding * high)
        is_inside = (value > low) & (value < high) & ~near
        close += select(near, value, zero)
        inside += select(is_inside, value, zero)
    return bool(close > CLOSE_CALL * inside)


@njit(error_model="numpy")
def _finish(weights: Array, lower: Bound, upper: Bound, scale: float) -> None:
    """Turn weights into probabilities."""
    for i in range(weights.shape[0]):
        low, high = _at(lower, i), _at(upper, i)
        value = weights[i] * scale
        value = select(value > low, value, low)
        weights[i] = select(value < high, value, high)


@njit(error_model="numpy")
def _mark(weights: Array, lower: Bound, upper: Bound, scale: float, side: Array) -> None:
    """Write down which side of its box every class is on, before `_finish` forgets it."""
    free, at_lower, at_upper = np.int8(FREE), np.int8(AT_LOWER), np.int8(AT_UPPER)
    for i in range(weights.shape[0]):
        low, high = _at(lower, i), _at(upper, i)
        value = weights[i] * scale
        under = (value < low) | ((low == high) & (value <= high))
        side[i] = select(under, at_lower, select(value > high, at_upper, free))


@njit(error_model="numpy")
def _search(  # noqa: PLR0917 - compiled loops take arrays by position
    row: Array, lower: Bound, upper: Bound, inverse: float, anchor: float, weights: Array, scale: float
) -> tuple[float, bool]:
    """Find the scale at which the sum is 1, by Newton from that of the softmax; whether it can be relied on.

    The weights are made anew, from another anchor, where the scale has left what their digits can bear.
    """
    kind = row.dtype.type
    unit, low_end, high_end = np.finfo(kind).eps, 0.0, np.inf
    for step in range(MAX_STEPS):
        held, free = _split(weights, lower, upper, kind(scale))
        mass, last = 1.0 - held, scale
        if 0.0 <= mass < LEAST_MASS:
            break
        if scale * free > mass:
            high_end = min(high_end, scale)
        else:
            low_end = max(low_end, scale)
        scale = mass / free if free > 0.0 else -1.0
        if kind(scale) == kind(last) or (step > NEAR_TIES and abs(scale - last) <= unit * scale):
            if scale <= _largest_scale(weights):
                return scale, not _is_close_call(weights, lower, upper, kind(scale))
            moved = _largest_free(row, weights, lower, upper, kind(scale))
            if moved == -np.inf:
                break
            scale *= math.exp(np.float64(moved - anchor) * inverse)
            anchor, low_end, high_end = moved, 0.0, np.inf
            _exponentials(row, anchor, inverse, weights)
        elif not low_end <= scale <= high_end:
            middle = math.sqrt(low_end * high_end) if low_end > 0.0 else SHRINK * high_end
            scale = middle if high_end < np.inf else low_end / SHRINK
    return scale, False


@njit(error_model="numpy")
def solve_row(  # noqa: PLR0917 - compiled loops take arrays by position
    row: Array, lower: Bound, upper: Bound, inverse: float, tolerance: float, weights: Array, side: Array
) -> int:
    """Solve one row in place of its weights."""
    kind = row.dtype.type
    top, bottom = _extremes(row)
    if not (-np.inf < top < np.inf) or np.isnan(bottom):
        return REFUSED
    if 1.0 / EXTREME < inverse < EXTREME:
        scale = 1.0 / _exponentials(row, top, inverse, weights)
        smallest = _exponential(bottom, top, _rate(inverse, row))
        plain = solved = _holds(lower, upper, smallest * kind(scale), kind(scale))
        if not plain:
            scale, solved = _search(row, lower, upper, inverse, top, weights, scale)
        if solved:
            if side.shape[0] and plain:
                side[:] = FREE
            elif side.shape[0]:
                _mark(weights, lower, upper, kind(scale), side)
            _finish(weights, lower, upper, kind(scale))
            return PLAIN if plain else SOLVED
    marks = side if side.shape[0] else np.empty(row.shape[0], np.int8)
    return solve_exactly(row, _as_row(lower, row), _as_row(upper, row), inverse, tolerance, weights, marks)


@compiled
def forward_rows(  # noqa: PLR0917 - compiled loops take arrays by position
    logits: Array,
    lower: Array,
    upper: Array,
    inverse: Array,
    tolerance: float,
    probabilities: Array,
    side: Array,
    held: Array,
) -> int:
    """Fill probabilities, side and held; return the first row that is refused, or -1.

    Parameters
    ----------
    logits, probabilities : ndarray of shape (N, K), both float32 or both float64
    lower, upper : ndarray of the same dtype; both (N or 1, K), or both (N or 1,) when uniform
    inverse : float64 ndarray of shape (N or 1,)
        One over the temperature.
    tolerance : float
        How far a sum of bounds may miss 1.
    side : int8 ndarray of shape (N, K), or (1, 0) where nobody asks for it
    held : bool ndarray of shape (N,), or (0,) likewise
        False where no bound holds any class of the row, as far as a look at two numbers tells.
    """
    for n in range(logits.shape[0]):
        low, high = _of_row(lower, n), _of_row(upper, n)
        if n < max(lower.shape[0], upper.shape[0]) and not _is_box(low, high):
            return n
        rate = inverse[own(n, inverse)]
        marks = side[own(n, side)]
        outcome = solve_row(logits[n], low, high, rate, tolerance, probabilities[n], marks)
        if outcome == REFUSED:
            return n
        if held.shape[0]:
            held[n] = outcome != PLAIN
    return -1


@njit(error_model="numpy", fastmath=SUMMING)
def total_of(row: Array) -> float:
    """Return the sum of numbers (K,)."""
    total = 0.0
    for i in range(row.shape[0]):
        total += row[i]
    return total


@njit(error_model="numpy")
def _is_finite(row: Array) -> bool:
    """Whether no entry is NaN or infinity."""
    finite = True
    for i in range(row.shape[0]):
        finite &= abs(row[i]) < np.inf
    return finite


@compiled
def summarised_rows(  # noqa: PLR0917 - compiled loops take arrays by position
    given: Array,
    logits: Array,
    lower: Array,
    upper: Array,
    tolerance: float,
    probabilities: Array,
    sums: Array,
    largest: Array,
) -> int:
    """Do what `forward_rows` does for one box and the temperature 1, and look at each row while it is near.

    Refused is also a row that was given an infinite logit.

    Parameters
    ----------
    given, logits : float64 ndarray of shape (N, K)
        Before and after a temperature.
    lower, upper : ndarray of shape (1,)
    sums, largest : float64 ndarray of shape (N,)
        Of the probabilities of each row.
    """
    low, high, marks = lower[0], upper[0], np.empty(0, np.int8)
    if not _is_box(low, high):
        return 0
    for n in range(logits.shape[0]):
        row = probabilities[n]
        if not _is_finite(given[n]) or solve_row(logits[n], low, high, 1.0, tolerance, row, marks) == REFUSED:
            return n
        sums[n] = total_of(row)
        largest[n] = _extremes(row)[0]
    return -1
