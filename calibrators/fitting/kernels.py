"""Compiled loops of a joint fit: the negative log-likelihood of a row in a box, and all its derivatives.

The kernel answers for one row with scores z, label y and the box [a, b] on every class. BCSoftmax then is
`p = clip(scale * exp(z), a, b)` with the one scale at which it sums to 1, and

    -log p_y = -log a, -log b, or -(z_y + log scale),   scale = (1 - n_b b - n_a a) / (sum of free exp(z))

where n_a and n_b count the classes held at a and b. The derivatives follow by hand (the paper's Jacobians of
BCSoftmax, contracted with the loss). Working with z_y and log scale keeps tiny probabilities exact.
"""

import math
from typing import Any

import numba
import numpy as np

Array = np.ndarray[Any, Any]

_ROUNDS = 200


@numba.njit(nogil=True, cache=True)
def _solve_dense(  # noqa: PLR0912 - the branches of one safeguarded Newton step
    weights: Array, total: float, lower: float, upper: float
) -> float:
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


@numba.njit(nogil=True, cache=True)
def dense_nll(  # noqa: PLR0912, PLR0917 - one pass over a row; compiled loops take arrays by position
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

    `scores` (N, K) in any order, `labels` (N,), `lower` and `upper` (N,) one box per row; `losses`,
    `d_lower`, `d_upper` (N,) and `d_scores` (N, K) receive the answer.
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


@numba.njit(nogil=True, cache=True)
def isotonic_with_one_more(counts: Array, sums: Array, label: float) -> Array:
    """Value of the isotonic fit at a new sample, for every gap between the groups of the old ones.

    Group i holds `counts[i]` samples of equal score with `sums[i]` hits among them; gap i lies before group
    i, the last one behind all. The blocks of the fits to everything left of a gap, and to everything right
    of it, are chains that share their links, so that all gaps together cost little more than one fit.
    """
    size = len(counts)
    begin, left_count, left_sum = np.empty(size, np.int64), counts.copy(), sums.copy()
    end, right_count, right_sum = np.empty(size, np.int64), counts.copy(), sums.copy()
    for i in range(size):
        begin[i] = i
        before = i - 1
        while before >= 0 and left_sum[before] * left_count[i] >= left_sum[i] * left_count[before]:
            left_sum[i] += left_sum[before]
            left_count[i] += left_count[before]
            begin[i] = begin[before]
            before = begin[i] - 1
    for i in range(size - 1, -1, -1):
        end[i] = i
        after = i + 1
        while after < size and right_sum[after] * right_count[i] <= right_sum[i] * right_count[after]:
            right_sum[i] += right_sum[after]
            right_count[i] += right_count[after]
            end[i] = end[after]
            after = end[i] + 1
    values = np.empty(size + 1)
    for gap in range(size + 1):
        total, count = label, 1.0
        before, after = gap - 1, gap
        pooled = True
        while pooled:
            pooled = False
            if before >= 0 and left_sum[before] * count >= total * left_count[before]:
                total += left_sum[before]
                count += left_count[before]
                before = begin[before] - 1
                pooled = True
            if after < size and right_sum[after] * count <= total * right_count[after]:
                total += right_sum[after]
                count += right_count[after]
                after = end[after] + 1
                pooled = True
        values[gap] = total / count
    return values


@numba.njit(nogil=True, cache=True)
def running_weights(ascending: Array, sums: Array) -> None:
    """Fill sums (N, K + 1) with the sums of exp(z) of the classes before each, z <= 0 ascending."""
    for n in range(ascending.shape[0]):
        sums[n, 0] = 0.0
        for k in range(ascending.shape[1]):
            sums[n, k + 1] = sums[n, k] + math.exp(max(ascending[n, k], -700.0))


@numba.njit(nogil=True, cache=True)
def clipped_nll(  # noqa: PLR0917 - compiled loops take arrays by position
    ascending: Array, sums: Array, own: Array, tops: Array, norms: Array, lower: float, upper: float
) -> tuple[float, float, float]:
    """Mean loss of softmax(clip(z, lower |z|, upper |z|)), and its derivatives in lower and upper.

    `ascending` (N, K) are rows of z less their largest entry, `sums` their running weights, `own` (N,) the
    label's entry of them, `tops` (N,) the largest entries and `norms` (N,) the rows' norms.
    """
    count, size = ascending.shape
    loss, d_lower, d_upper = 0.0, 0.0, 0.0
    for n in range(count):
        row = ascending[n]
        low = max(lower * norms[n] - tops[n], -700.0)
        high = max(upper * norms[n] - tops[n], -700.0)
        first = int(np.searchsorted(row, low))
        end = max(int(np.searchsorted(row, high)), first)
        at_low, at_high = first * math.exp(min(low, 0.0)), (size - end) * math.exp(min(high, 0.0))
        if low > 0.0:  # every class is below: all are equal
            loss += math.log(size)
            continue
        total = at_low + (sums[n, end] - sums[n, first]) + at_high
        by_low, by_high = at_low / total, at_high / total
        if own[n] < low:
            loss -= low
            by_low -= 1.0
        elif own[n] > high:
            loss -= high
            by_high -= 1.0
        else:
            loss -= own[n]
        loss += math.log(total)
        d_lower += by_low * norms[n]
        d_upper += by_high * norms[n]
    return loss / count, d_lower / count, d_upper / count
