"""Compiled loops of a fit: the negative log-likelihood of a row under uniform bounds, and its derivatives.

Both kernels answer for one row with scores z, label y and the box [a, b] on every class. BCSoftmax then is
`p = clip(scale * exp(z), a, b)` with the one scale at which it sums to 1, and

    -log p_y = -log a, -log b, or -(z_y + log scale),   scale = (1 - n_b b - n_a a) / sum over free classes of exp(z)

where n_a and n_b count the classes held at a and b. The derivatives follow by hand (the paper's Jacobians of
BCSoftmax, contracted with the loss). Working with z_y and log scale keeps tiny probabilities exact.
"""

import math
from typing import Any

import numba
import numpy as np

Array = np.ndarray[Any, Any]

_ROUNDS = 200


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _first_below(row: Array, threshold: float, inclusive: bool) -> int:
    """First index of a descending row whose value is below the threshold (or equal, when inclusive)."""
    left, right = 0, len(row)
    while left < right:
        middle = (left + right) // 2
        if row[middle] < threshold or (inclusive and row[middle] == threshold):
            right = middle
        else:
            left = middle + 1
    return left


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _solve_sorted(weights: Array, tails: Array, lower: float, upper: float) -> tuple[int, int, float]:
    """Find how many classes sit at the upper bound, where those at the lower bound begin, and the scale.

    `weights` are exp(z - max z) in descending order, `tails[i]` their sum from i on: differences of tails
    lose nothing where the largest classes are bounded away. Newton on the piecewise linear sum, kept inside a
    bracket.
    """
    size = len(weights)
    scale = 1.0 / tails[0]
    if scale * weights[0] <= upper and scale * weights[size - 1] >= lower:
        return 0, size, scale
    low, high = 0.0, math.inf
    at_upper, at_lower = -1, -1
    for _ in range(_ROUNDS):
        above = _first_below(weights, upper / scale, False)
        below = max(_first_below(weights, lower / scale, True), above)
        free = tails[above] - tails[below]
        rest = 1.0 - above * upper - (size - below) * lower
        if above == at_upper and below == at_lower:
            break
        at_upper, at_lower = above, below
        missing = rest - scale * free
        if missing > 0.0:
            low = max(low, scale)
        else:
            high = min(high, scale)
        step = rest / free if free > 0.0 and rest > 0.0 else 0.0
        if not (low < step < high):
            if free > 0.0 or missing == 0.0:
                if low == 0.0 or high == math.inf:
                    step = scale * 2.0 if high == math.inf else scale * 0.5
                else:
                    step = math.sqrt(low) * math.sqrt(high)
            elif missing > 0.0:
                step = lower / weights[above] if lower > 0.0 else scale * 2.0
                step = step * (1.0 + 1e-15)
            else:
                step = upper / weights[above - 1] * (1.0 - 1e-15)
            if not (low < step < high):
                step = math.sqrt(low) * math.sqrt(high)
            at_upper, at_lower = -1, -1
        if step == scale:
            break
        scale = step
    return above, below, scale


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def sorted_nll(
    weights: Array, tails: Array, ranks: Array, gaps: Array, lower: float, upper: float
) -> tuple[float, float, float]:
    """Mean loss over sorted rows for one scalar box, and its derivatives in the lower and the upper bound.

    `weights` (N, K) and `tails` (N, K + 1) as in `_solve_sorted`; `ranks` (N,) the label's place in the
    row; `gaps` (N,) the label's z minus the row's maximum.
    """
    count, size = weights.shape
    loss, d_lower, d_upper = 0.0, 0.0, 0.0
    for n in range(count):
        above, below, scale = _solve_sorted(weights[n], tails[n], lower, upper)
        rank = ranks[n]
        if rank < above:
            loss -= math.log(upper)
            d_upper -= 1.0 / upper
        elif rank >= below:
            loss -= math.log(lower)
            d_lower -= 1.0 / lower
        else:
            rest = scale * (tails[n, above] - tails[n, below])
            loss -= gaps[n] + math.log(scale)
            d_lower += (size - below) / rest
            d_upper += above / rest
    return loss / count, d_lower / count, d_upper / count


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _solve_dense(weights: Array, total: float, lower: float, upper: float) -> float:
    """Return the scale for a row in any order: every round is one pass of clip and count."""
    scale = 1.0 / total
    low, high = 0.0, math.inf
    before_above, before_below = -1, -1
    for _ in range(_ROUNDS):
        above, below, free = 0, 0, 0.0
        smallest_above, largest_below = math.inf, 0.0
        for k in range(len(weights)):
            value = weights[k] * scale
            if value >= upper:
                above += 1
                smallest_above = min(smallest_above, weights[k])
            elif value <= lower:
                below += 1
                largest_below = max(largest_below, weights[k])
            else:
                free += weights[k]
        if above == before_above and below == before_below:
            break
        before_above, before_below = above, below
        rest = 1.0 - above * upper - below * lower
        missing = rest - scale * free
        if missing > 0.0:
            low = max(low, scale)
        else:
            high = min(high, scale)
        step = rest / free if free > 0.0 and rest > 0.0 else 0.0
        if not (low < step < high):
            if free > 0.0 or missing == 0.0:
                if high == math.inf:
                    step = scale * 2.0
                elif low == 0.0:
                    step = scale * 0.5
                else:
                    step = math.sqrt(low) * math.sqrt(high)
            elif missing > 0.0:
                step = lower / largest_below * (1.0 + 1e-15) if lower > 0.0 else scale * 2.0
            else:
                step = upper / smallest_above * (1.0 - 1e-15)
            if not (low < step < high):
                step = math.sqrt(low) * math.sqrt(high)
            before_above, before_below = -1, -1
        if step == scale:
            break
        scale = step
    return scale


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def dense_nll(
    scores: Array,
    labels: Array,
    lower: Array,
    upper: Array,
    losses: Array,
    d_scores: Array,
    d_lower: Array,
    d_upper: Array,
) -> None:
    """Loss of every row and its derivatives, written into the arrays given.

    `scores` (N, K) in any order, `labels` (N,), `lower` and `upper` (N,) one box per row; `losses`, `d_lower`,
    `d_upper` (N,) and `d_scores` (N, K) receive the answer.
    """
    count, size = scores.shape
    weights = np.empty(size)
    for n in range(count):
        largest = scores[n, 0]
        for k in range(1, size):
            largest = max(largest, scores[n, k])
        total, smallest = 0.0, math.inf
        for k in range(size):
            weights[k] = math.exp(max(scores[n, k] - largest, -700.0))
            total += weights[k]
            smallest = min(smallest, weights[k])
        a, b, y = lower[n], upper[n], labels[n]
        d_lower[n], d_upper[n] = 0.0, 0.0
        scale = 1.0 / total
        if scale <= b and scale * smallest >= a:
            losses[n] = math.log(total) - (scores[n, y] - largest)
            for k in range(size):
                d_scores[n, k] = weights[k] * scale
            d_scores[n, y] -= 1.0
            continue
        scale = _solve_dense(weights, total, a, b)
        held_above, held_below, rest = 0, 0, 0.0
        for k in range(size):
            value = weights[k] * scale
            if value >= b:
                held_above += 1
            elif value <= a:
                held_below += 1
            else:
                rest += value
        if weights[y] * scale >= b:
            losses[n] = -math.log(b)
            d_upper[n] = -1.0 / b
            d_scores[n, :] = 0.0
        elif weights[y] * scale <= a:
            losses[n] = -math.log(a)
            d_lower[n] = -1.0 / a
            d_scores[n, :] = 0.0
        else:
            losses[n] = -(scores[n, y] - largest) - math.log(scale)
            d_lower[n] = held_below / rest
            d_upper[n] = held_above / rest
            for k in range(size):
                value = weights[k] * scale
                d_scores[n, k] = value / rest if a < value < b else 0.0
            d_scores[n, y] -= 1.0


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def weigh(descending: Array, tails: Array) -> None:
    """Turn rows of negated scores, ascending, into exp(z - max z), and fill their (N, K + 1) tail sums."""
    count, size = descending.shape
    for n in range(count):
        least = descending[n, 0]
        for k in range(size):
            descending[n, k] = math.exp(max(least - descending[n, k], -700.0))
        tails[n, size] = 0.0
        for k in range(size - 1, -1, -1):
            tails[n, k] = tails[n, k + 1] + descending[n, k]
