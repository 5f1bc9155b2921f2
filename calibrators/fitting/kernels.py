"""Compiled loops of fits: the isotonic fits of Venn-Abers, and the loss of clipped logits."""

import math
from typing import Any

import numpy as np

from boxcal.calibrators.operator.compiling import compiled

Array = np.ndarray[Any, Any]


@compiled
def isotonic_with_one_more(counts: Array, sums: Array, label: float) -> Array:
    """Value of the isotonic fit at a new sample, in every place among the groups of the old ones.

    Group i holds `counts[i]` samples of equal score with `sums[i]` hits among them. The answer has 2 M + 1
    entries for M groups: place 2 i lies in the gap before group i, place 2 i + 1 in the group itself. The
    blocks of the fits to everything left of a place, and to everything right of it, are chains that share
    their links, so that all places together cost little more than one fit.
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
    values = np.empty(2 * size + 1)
    for place in range(2 * size + 1):
        total, count = label, 1.0
        before, after = place // 2 - 1, (place + 1) // 2
        if place % 2:
            total += sums[place // 2]
            count += counts[place // 2]
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
        values[place] = total / count
    return values


@compiled
def running_weights(ascending: Array, sums: Array) -> None:
    """Fill sums (N, K + 1) with the sums of exp(z) of the classes before each, z <= 0 ascending."""
    for n in range(ascending.shape[0]):
        sums[n, 0] = 0.0
        for k in range(ascending.shape[1]):
            sums[n, k + 1] = sums[n, k] + math.exp(max(ascending[n, k], -700.0))


@compiled
def clipped_nll(  # noqa: PLR0917 - compiled loops take arrays by position
    ascending: Array,
    sums: Array,
    own: Array,
    tops: Array,
    norms: Array,
    weights: Array,
    lower: float,
    upper: float,
) -> tuple[float, float, float]:
    """Mean loss of softmax(clip(z, lower |z|, upper |z|)), and its derivatives in lower and upper.

    `ascending` (N, K) are rows of z less their largest entry, `sums` their running weights, `own` (N,) the
    label's entry of them, `tops` (N,) the largest entries, `norms` (N,) the rows' norms and `weights`
    (N,), of mean 1, how much each counts.
    """
    count, size = ascending.shape
    loss, d_lower, d_upper = 0.0, 0.0, 0.0
    for n in range(count):
        row, weight = ascending[n], weights[n]
        low = max(lower * norms[n] - tops[n], -700.0)
        high = max(upper * norms[n] - tops[n], -700.0)
        first = int(np.searchsorted(row, low))
        end = max(int(np.searchsorted(row, high)), first)
        at_low, at_high = first * math.exp(min(low, 0.0)), (size - end) * math.exp(min(high, 0.0))
        if low > 0.0:  # every class is below: all are equal
            loss += weight * math.log(size)
            continue
        total = at_low + (sums[n, end] - sums[n, first]) + at_high
        by_low, by_high = at_low / total, at_high / total
        if own[n] < low:
            loss -= weight * low
            by_low -= 1.0
        elif own[n] > high:
            loss -= weight * high
            by_high -= 1.0
        else:
            loss -= weight * own[n]
        loss += weight * math.log(total)
        d_lower += weight * (by_low * norms[n])
        d_upper += weight * (by_high * norms[n])
    return loss / count, d_lower / count, d_upper / count


@compiled
def largest_of_columns(mapped: Array, largest: Array, order: Array) -> None:
    """Fill (T, N) with the T largest entries of each column of (K, N), the largest first, and their rows."""
    for n in range(mapped.shape[1]):
        for k in range(mapped.shape[0]):
            value = mapped[k, n]
            place = min(k, len(largest))
            while place and largest[place - 1, n] < value:
                place -= 1
                if place + 1 < len(largest):
                    largest[place + 1, n] = largest[place, n]
                    order[place + 1, n] = order[place, n]
            if place < len(largest):
                largest[place, n], order[place, n] = value, k
