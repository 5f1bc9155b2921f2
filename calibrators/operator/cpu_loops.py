"""The fused loops of the CPU engine: one row at a time, while it lies in the nearest cache.

`cpu_kernel` hands arrays down; `exact_row` takes the few rows that these loops give up on. All release the
interpreter's lock, so that any number of threads may be inside them.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from boxcal.calibrators.operator.compiling import compiled, inner
from boxcal.calibrators.operator.constants import AT_LOWER, AT_UPPER, FREE
from boxcal.calibrators.operator.cpu_math import bits, fast_exp, from_bits, ordered, select, wide
from boxcal.calibrators.operator.exact_row import PLAIN, REFUSED, SOLVED, Array, solve_exactly
from boxcal.calibrators.operator.teams import share

SUMMING = {"contract", "reassoc", "nsz"}
"""Let sums be split over vector lanes; NaN and infinity keep their meaning."""

MAX_STEPS = 24
"""Newton passes and new anchors before a row goes to `exact_row`; common rows take 1 or 2."""

EARLY_STEPS, NEAR, LONG, FEW = 10, 0.02, 256, 4
"""Passes in the row's own dtype before those, the step relative to the scale that ends them, from how many
classes on they cost less than they save, and at how few that one number holds Newton's step is better."""

NEAR_TIES = 6
"""After so many passes, classes within rounding of a bound may be what keeps the scale moving."""

DOUBLE = np.empty(0)
"""Stands for sums in float64, whatever the row's dtype."""

SHRINK = 0.25
"""How far to step where bounds hold every class and nothing brackets the scale: down, or its inverse up."""

EXTREME = 1e30
"""Temperatures beyond this, or below its inverse, lie outside of what float32 multiplies: for `exact_row`."""

CLOSE_CALL = 64
"""Rounding moves an ulp or two of the mass of classes near their bounds; who has 1/64 of it may feel that."""

LEAST_MASS = 1e-6
"""Below so little free mass, what cancels in 1 - (held mass) matters: `exact_row` adds without loss."""

UNSOLVED = -2
"""What a part of the rows leaves behind that had no memory for `exact_row`."""

Bound = float | Array
"""One bound for the whole row, or one for each class; every loop is compiled for both."""

Box = tuple[bool, float, float]
"""Whether bounds are a box within [0, 1], and the sums of the lower and of the upper ones."""


def _either(of_array: Callable[..., Any], of_number: Callable[..., Any]) -> Callable[..., Any]:
    """Compile one function for bounds by class and another for one number, as the first argument is."""

    def choose(bound, *_others):  # type: ignore[no-untyped-def] # numba compares annotations
        return of_array if isinstance(bound, types.Array) else of_number

    def chosen(_bound, *_others):  # type: ignore[no-untyped-def]
        raise NotImplementedError

    overload(chosen, {"error_model": "numpy", "fastmath": SUMMING, "forceinline": True}, strict=False)(choose)
    return chosen


_is_number = _either(lambda bound: False, lambda bound: True)
_at = _either(lambda bound, i: bound[i], lambda bound, i: bound)
_as_row = _either(lambda bound, row: bound, lambda bound, row: np.full(row.shape[0], bound))
_holds = _either(
    lambda lower, upper, smallest, largest: False,
    lambda lower, upper, smallest, largest: lower <= smallest and largest <= upper,
)
"""Whether a plain softmax obeys its bounds, where two numbers tell."""


@inner()
def own(n: int, values: Array) -> int:
    """Where row n finds its own among values of which a single one may stand for all rows."""
    return n if values.shape[0] > 1 else 0


@inner()
def _is_single(row: Array) -> bool:
    """Whether the row is of float32; the compiler knows."""
    return bool(np.finfo(row.dtype).bits == 32)


@inner()
def _extremes(row: Array) -> tuple[float, float]:
    """Largest and smallest entry; NaN or infinity where an entry is."""
    wide()
    high = ordered(bits(row[0]))
    low = high
    for i in range(1, row.shape[0]):
        value = ordered(bits(row[i]))
        high = select(value > high, value, high)
        low = select(value < low, value, low)
    return from_bits(ordered(high)), from_bits(ordered(low))


@inner()
def _is_finite(row: Array) -> bool:
    top, bottom = _extremes(row)
    return bool(-np.inf < bottom <= top < np.inf)


@inner()
def _rate(inverse: float, row: Array) -> tuple[Any, Any]:
    """One over the temperature as two numbers of the row's dtype, with the digits of float64."""
    high = row.dtype.type(inverse)
    return high, row.dtype.type(inverse - np.float64(high))


@inner(fastmath=SUMMING)
def _exponential(logit: Any, anchor: Any, rate: tuple[Any, Any]) -> Any:
    """Compute exp((logit - anchor) / temperature)."""
    distance = logit - anchor
    return fast_exp(distance * rate[0] + distance * rate[1])


@inner(fastmath=SUMMING, inlined=False)  # which LLVM makes a better loop of
def _exponentials(row: Array, anchor: float, inverse: float, weights: Array) -> float:
    """Fill weights with exp((row - anchor) / temperature); return their sum."""
    wide()
    rate = _rate(inverse, row)
    for i in range(row.shape[0]):
        weights[i] = _exponential(row[i], anchor, rate)
    total = 0.0
    for i in range(row.shape[0]):
        total += np.float64(weights[i])
    return total


def _begin_arrays(  # noqa: PLR0917 - as below
    lower: Array, upper: Array, row: Array, anchor: float, inverse: float, weights: Array
) -> Any:
    wide()
    rate, zero = _rate(inverse, row), row.dtype.type(0)
    total, inside, low_sum, high_sum = zero, True, zero, zero
    for i in range(row.shape[0]):
        weights[i] = _exponential(row[i], anchor, rate)
        total += weights[i]
        inside &= (lower[i] >= 0) & (lower[i] <= upper[i]) & (upper[i] <= 1)
        low_sum += lower[i]
        high_sum += upper[i]
    return np.float64(total), (inside, np.float64(low_sum), np.float64(high_sum))


def _begin_numbers(  # noqa: PLR0917 - as below
    lower: float, upper: float, row: Array, anchor: float, inverse: float, weights: Array
) -> Any:
    box = 0 <= lower <= upper <= 1, np.float64(lower) * row.shape[0], np.float64(upper) * row.shape[0]
    return _exponentials(row, anchor, inverse, weights), box


_begin = _either(_begin_arrays, _begin_numbers)
"""Fill weights as `_exponentials` does, and look at the box; where that is of numbers, the sum is precise."""


@inner(fastmath=SUMMING)
def _split(weights: Array, lower: Bound, upper: Bound, scale: float, sums: Array) -> tuple[float, float]:
    """At this scale: the mass that bounds hold, and the weight of the free classes.

    The latter is added in the row's own dtype. On 32 lanes, sums of n numbers in float32 are off by at most
    (n / 32 + 5) 2^-24 of themselves, 2e-6 at n = 1000. The former is then what is left of the answer's sum,
    added in the dtype of `sums`, so that a Newton step has that error relative to its length.
    """
    wide()
    zero = weights.dtype.type(0)
    total, free = sums.dtype.type(0), zero
    for i in range(weights.shape[0]):
        weight, low, high = weights[i], _at(lower, i), _at(upper, i)
        value = weight * scale
        clipped = select(value > low, value, low)
        clipped = select(clipped < high, clipped, high)
        is_free = clipped == value
        free += select(is_free, weight, zero)
        if _is_single(weights):
            total += sums.dtype.type(clipped)
        else:
            total += select(is_free, zero, clipped)
    if _is_single(weights):
        return np.float64(total) - np.float64(scale) * np.float64(free), np.float64(free)
    return total, free


@inner()
def _approach(weights: Array, lower: Bound, upper: Bound, box: Box, scale: float) -> float:
    """Come near the scale at which the sum is 1, from that of the softmax.

    Between L = sum(lower) and U = sum(upper) the sum S(scale) rises about as a logistic function of
    log(scale) does. A Newton step on log((S - L) / (U - S)) therefore goes as far as many steps on S, which
    creep where one class after the other meets its bound:

        scale <- scale / r^d,  r = (S - L) (U - 1) / ((U - S) (1 - L)),
                               d = (S - L) (U - S) / (S' scale (U - L)).
    Where one number holds a few classes only, Newton's own step is the better one, and mostly the last. The
    scale need not be right: `_search` takes any start.
    """
    kind, (_, low_sum, high_sum), low_end, high_end = weights.dtype.type, box, 0.0, np.inf
    few = FEW * high_sum / weights.shape[0] if _is_number(upper) else 0.0
    for _ in range(EARLY_STEPS):
        held, free = _split(weights, lower, upper, kind(scale), weights)
        if free == 0.0:
            break
        total, newton = held + scale * free, (1.0 - held) / free
        if abs(newton - scale) <= NEAR * scale or held < min(1.0, few):
            return newton
        if total > 1.0:
            high_end = scale
        else:
            low_end = scale
        above, below = total - low_sum, high_sum - total
        ratio = above * (high_sum - 1.0) / (below * (1.0 - low_sum))
        scale *= ratio ** (-above * below / (free * scale * (high_sum - low_sum)))
        if not low_end < scale < high_end:  # or it is NaN, outside of the limits
            scale = newton
        if not low_end < scale < high_end:
            break
    return max(low_end, min(scale, high_end))


@inner()
def _largest_free(row: Array, weights: Array, lower: Bound, upper: Bound, scale: float) -> Any:
    """Largest logit of a class that no bound holds at this scale."""
    lowest = ordered(bits(row.dtype.type(-np.inf)))
    largest = lowest
    for i in range(row.shape[0]):
        value = weights[i] * scale
        is_free = (value >= _at(lower, i)) & (value <= _at(upper, i))
        logit = select(is_free, ordered(bits(row[i])), lowest)
        largest = select(logit > largest, logit, largest)
    return from_bits(ordered(largest))


@inner(fastmath=SUMMING)
def _is_close_call(weights: Array, lower: Bound, upper: Bound, scale: float) -> bool:
    """Whether classes within rounding of a bound outweigh those well inside their bounds.

    Which side the former are on then decides about the latter, and takes more digits to tell. With rounding
    e, they are

        well inside: value (1 - e) > lower and value (1 + e) < upper
        inside or close: value (1 + e) >= lower and value (1 - e) <= upper

    As all weigh at most 1, it mostly takes a look at the first few to know.
    """
    wide()
    zero, one = weights.dtype.type(0), weights.dtype.type(1)
    rounding = weights.dtype.type(4 * np.finfo(weights.dtype).eps)
    size, end = 0, weights.shape[0]
    within, inside = zero, zero
    while size < end and inside * CLOSE_CALL <= 1:
        size = min(max(LONG, 8 * size), end)
        within, inside = zero, zero
        for i in range(size):
            low, high, value = _at(lower, i), _at(upper, i), weights[i] * scale
            more, less = value * (one + rounding), value * (one - rounding)
            within += select((more >= low) & (less <= high), value, zero)
            inside += select((less > low) & (more < high), value, zero)
    return bool(within - inside > CLOSE_CALL * inside)


@inner(fastmath=SUMMING)
def _finish(weights: Array, lower: Bound, upper: Bound, scale: float, side: Array) -> float:
    """Make probabilities of the weights, and fill side where it has room; return in float32 their sum."""
    wide()
    total, free, at_lower, at_upper = 0.0, np.int8(FREE), np.int8(AT_LOWER), np.int8(AT_UPPER)
    for i in range(weights.shape[0]):
        low, high = _at(lower, i), _at(upper, i)
        value = weights[i] * scale
        clipped = select(value > low, value, low)
        clipped = select(clipped < high, clipped, high)
        weights[i] = clipped
        if _is_single(weights):
            total += np.float64(clipped)
        if side.shape[0]:
            under = (value < low) | ((low == high) & (value <= high))
            side[i] = select(under, at_lower, select(value > high, at_upper, free))
    return total


@inner()
def _search(  # noqa: PLR0917 - compiled loops take arrays by position
    row: Array,
    lower: Bound,
    upper: Bound,
    inverse: float,
    anchor: float,
    weights: Array,
    scale: float,
    side: Array,
) -> bool:
    """Turn weights into the answer at the scale at which the sum is 1, by Newton; whether to rely on it.

    The weights are made anew, from another anchor, where the scale has left what their digits can bear.
    Near the end, float32 tries the next scale at once, which mostly is the last: if the sum of the answer is
    as close to 1 as rounding of the scale and of the answer lets it be. That saves a pass.
    """
    kind = row.dtype.type
    unit, low_end, high_end = np.finfo(kind).eps, 0.0, np.inf
    largest = 1.0 if _is_single(row) else 1e100  # the weights have lost digits beyond
    for step in range(MAX_STEPS):
        held, free = _split(weights, lower, upper, kind(scale), DOUBLE)
        mass, last = 1.0 - held, np.float64(kind(scale))
        if 0.0 <= mass < LEAST_MASS:
            break
        if last * free > mass:
            high_end = min(high_end, last)
        else:
            low_end = max(low_end, last)
        scale = mass / free if free > 0.0 else -1.0
        settled = kind(scale) == last or (step > NEAR_TIES and abs(scale - last) <= unit * scale)
        if settled or (_is_single(row) and abs(scale - last) <= NEAR * last):
            if scale <= largest:
                is_close = _is_close_call(weights, lower, upper, kind(scale))
                total = _finish(weights, lower, upper, kind(scale), side)
                if settled or abs(1.0 - total) <= 0.5 * unit * mass:
                    return not is_close
            else:
                moved = _largest_free(row, weights, lower, upper, kind(scale))
                if moved == -np.inf:
                    break
                scale *= math.exp(np.float64(moved - anchor) * inverse)
                anchor, low_end, high_end = moved, 0.0, np.inf
            _exponentials(row, anchor, inverse, weights)
        if not low_end <= scale <= high_end:
            middle = math.sqrt(low_end * high_end) if low_end > 0.0 else SHRINK * high_end
            scale = middle if high_end < np.inf else low_end / SHRINK
    return False


@inner()
def solve_row(  # noqa: PLR0917 - compiled loops take arrays by position
    row: Array,
    lower: Bound,
    upper: Bound,
    inverse: float,
    tolerance: float,
    probabilities: Array,
    side: Array,
) -> int:
    """Solve one row, whose exponentials lie where its answer will."""
    kind = row.dtype.type
    top, bottom = _extremes(row)
    if not (-np.inf < top < np.inf) or np.isnan(bottom):
        return REFUSED
    total, box = _begin(lower, upper, row, top, inverse, probabilities)
    if not box[0]:
        return REFUSED
    if 1.0 / EXTREME < inverse < EXTREME:
        scale = 1.0 / total
        smallest = _exponential(bottom, top, _rate(inverse, row))
        if _holds(lower, upper, smallest * kind(scale), kind(scale)):
            for i in range(row.shape[0]):
                probabilities[i] *= kind(scale)
            side[:] = FREE
            return PLAIN
        if row.shape[0] >= LONG and (_is_single(row) or not _is_number(lower)):
            scale = _approach(probabilities, lower, upper, box, scale)
        if _search(row, lower, upper, inverse, top, probabilities, scale, side):
            return SOLVED
    return _exactly(row, lower, upper, inverse, tolerance, probabilities, side)


@inner(makes_arrays=True)
def _exactly(  # noqa: PLR0917 - compiled loops take arrays by position
    row: Array, lower: Bound, upper: Bound, inverse: float, tolerance: float, answer: Array, side: Array
) -> int:
    """Call `solve_exactly` with float64 arrays for all that it takes: it is compiled once."""
    marks = side if side.shape[0] else np.empty(row.shape[0], np.int8)
    logits, found = row.astype(np.float64), np.empty(row.shape[0])
    low, high = _as_row(lower, row).astype(np.float64), _as_row(upper, row).astype(np.float64)
    outcome = solve_exactly(logits, low, high, inverse, tolerance, found, marks)
    for i in range(row.shape[0]):  # numba takes seconds to compile what an assignment of arrays may raise
        answer[i] = found[i]
    return outcome


@inner()
def _rows(part: int, parts: int, arguments: tuple[Any, ...]) -> None:
    """Solve this part of the rows; note the first that is refused, or -1."""
    logits, lower, upper, inverse, tolerance, probabilities, side, held, refused = arguments
    begin, end = logits.shape[0] * part // parts, logits.shape[0] * (part + 1) // parts
    first = -1
    for n in range(begin, end):
        low, high, rate, marks = (
            lower[own(n, lower)], upper[own(n, upper)], inverse[own(n, inverse)], side[own(n, side)]
        )  # fmt: skip
        outcome = solve_row(logits[n], low, high, rate, tolerance, probabilities[n], marks)
        if outcome == REFUSED:
            first = n
            break
        if held.shape[0]:
            held[n] = outcome != PLAIN
    refused[part] = first


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
    team: tuple[int, int],
) -> int:
    """Fill probabilities, side and held; return the first row that is refused, or -1.

    `logits`, `probabilities`: ndarray of shape (N, K), both float32 or both float64. `lower`, `upper`:
    ndarray of the same dtype; both (N or 1, K), or both (N or 1,) when uniform. `inverse`: float64 ndarray of
    shape (N or 1,), one over the temperature. `side`: int8 ndarray of shape (N, K), or (1, 0) where nobody
    asks for it. `held`: bool ndarray of shape (N,), or (0,) likewise, False where no bound holds any class of
    the row, as far as a look at two numbers tells. `team`: as `share` takes it.
    """
    refused = np.full(team[1], UNSOLVED)
    arguments = (logits, lower, upper, inverse, tolerance, probabilities, side, held, refused)
    share(team, _rows, arguments)
    if refused.min() == UNSOLVED:
        raise MemoryError
    for row in refused:
        if row >= 0:
            return int(row)
    return -1


@inner(fastmath=SUMMING)
def total_of(row: Array) -> float:
    """Return the sum of numbers (K,), added in their own dtype."""
    total = row.dtype.type(0)
    for i in range(row.shape[0]):
        total += row[i]
    return float(total)


@compiled
def softmax_rows(given: Array, logits: Array, probabilities: Array, sums: Array, largest: Array) -> int:
    """Do what `forward_rows` does where no bound holds anything, and look at each row while it is near.

    Return the first row that was given a logit that is not finite, or has become NaN or infinity; or -1. A
    service compiles this before it is ready: it must not contain the solver, which takes ten times as long.

    `given`, `logits`: float64 ndarray of shape (N, K), before and after a temperature; `given` has no rows
    where nobody asks. `sums`, `largest`: float64 ndarray of shape (N,), of the probabilities of each row, or
    (0,) where nobody asks.
    """
    for n in range(logits.shape[0]):
        row, (top, bottom) = probabilities[n], _extremes(logits[n])
        if not (-np.inf < top < np.inf) or np.isnan(bottom) or (given.shape[0] and not _is_finite(given[n])):
            return n
        scale = 1.0 / _exponentials(logits[n], top, 1.0, row)
        for i in range(row.shape[0]):
            row[i] *= scale
        if sums.shape[0]:
            sums[n], largest[n] = total_of(row), _extremes(row)[0]
    return -1


@compiled
def sums_of_rows(given: Array, probabilities: Array, sums: Array, largest: Array) -> int:
    """Look at rows as `softmax_rows` does, after `forward_rows`."""
    for n in range(given.shape[0]):
        if not _is_finite(given[n]):
            return n
        sums[n], largest[n] = total_of(probabilities[n]), _extremes(probabilities[n])[0]
    return -1


@compiled
def most_probable(probabilities: Array, logits: Array, ranking: Array) -> None:
    """Fill `ranking` (int64) with the indices of the largest probabilities of a row, the largest first.

    Of equal ones, which upper bounds create, the larger calibrated logit comes first, then the lower index.
    One pass with an insertion into the ranking so far: quick where it is short. Any other numbers will do.
    """
    filled, least = 0, -np.inf
    for i in range(len(probabilities)):
        if probabilities[i] < least:
            continue
        place = filled
        while place > 0:
            before = ranking[place - 1]
            if probabilities[i] < probabilities[before]:
                break
            if probabilities[i] == probabilities[before] and logits[i] <= logits[before]:
                break
            place -= 1
        if place >= len(ranking):
            continue
        if filled < len(ranking):
            filled += 1
        for k in range(filled - 1, place, -1):
            ranking[k] = ranking[k - 1]
        ranking[place] = i
        if filled == len(ranking):
            least = probabilities[ranking[filled - 1]]
