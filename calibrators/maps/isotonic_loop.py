"""Compiled loop of Venn-Abers: isotonic fits to all samples and one more, for every place of that one."""

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
