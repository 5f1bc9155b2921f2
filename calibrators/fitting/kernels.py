"""Compiled loops of the fit of `lb`: the loss of clipped logits."""

import math
from typing import Any

import numpy as np

from boxcal.calibrators.operator.compiling import compiled

Array = np.ndarray[Any, Any]


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
    norms: Array,
    weights: Array,
    lower: float,
    upper: float,
) -> tuple[float, float, float]:
    """Mean loss of softmax(clip(z, lower |z|, upper |z|)), and its derivatives in lower and upper.

    `ascending` (N, K) are rows of z, in which 0 is the largest entry, `sums` their running weights, `own`
    (N,) the label's entry of them, `norms` (N,) the rows' norms and `weights` (N,), of mean 1, how much each
    counts.
    """
    count, size = ascending.shape
    loss, d_lower, d_upper = 0.0, 0.0, 0.0
    for n in range(count):
        row, weight = ascending[n], weights[n]
        low = max(lower * norms[n], -700.0)
        high = max(upper * norms[n], -700.0)
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
