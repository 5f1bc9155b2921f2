"""Compiled loops of `closed_form_gradients`: losses of rows and their derivatives."""

import math
from typing import Any

import numba
import numpy as np

from boxcal.calibrators.operator.cpu_loops import SUMMING
from boxcal.calibrators.operator.cpu_math import bits, fast_exp, from_bits, ordered, select
from boxcal.calibrators.operator.uniform import solve_row

Array = np.ndarray[Any, Any]

LEAST = -700.0
"""Logits are kept this close to the largest of their row, so that no weight is zero."""


@numba.njit(nogil=True, cache=True, error_model="numpy")
def tempered_in_box(  # noqa: PLR0917 - compiled loops take arrays by position
    ascending: Array, own: Array, inverse: Array, lower: Array, upper: Array, cuts: Array, answer: Array
) -> None:
    """Fill answer (N, 4): each row's loss, and its derivatives in 1 / temperature and in both bounds.

    `ascending` (N, K) are rows of logits less their largest, `own` (N,) the label's entry of them; `inverse`,
    `lower`, `upper` (N,) are each row's 1 / temperature and bounds. `cuts` (N, 2) holds where each row met
    the bounds of the last call, and is brought up to date.
    """
    count, size = ascending.shape
    scaled, sums, moments = np.empty(size), np.empty(size), np.empty(size)
    for n in range(count):
        low, high, factor = lower[n], upper[n], inverse[n]
        log_low = math.log(low) if low > 0.0 else -math.inf
        log_high = math.log(high)
        before, total, moment = -math.inf, 0.0, 0.0
        for k in range(size):
            here = max(ascending[n, k] * factor, LEAST)
            step = math.exp(before - here)
            total = 1.0 + total * step
            moment = ascending[n, k] + moment * step
            scaled[k], sums[k], moments[k] = here, total, moment
            before = here
        score = max(own[n] * factor, LEAST)
        log_scale = -math.log(total)
        answer[n, 1], answer[n, 2], answer[n, 3] = 0.0, 0.0, 0.0
        if scaled[0] + log_scale >= log_low and log_scale <= log_high:
            answer[n, 0] = -score - log_scale
            answer[n, 1] = moment / total - own[n]
            continue
        log_scale, first, end, mass = solve_row(
            scaled, sums, low, high, log_low, log_high, cuts[n, 0], cuts[n, 1]
        )
        cuts[n, 0], cuts[n, 1] = first, end
        log_p = score + log_scale
        if first > 0 and log_p < log_low:
            answer[n, 0], answer[n, 2] = -log_low, -1.0 / low
        elif end < size and log_p > log_high:
            answer[n, 0], answer[n, 3] = -log_high, -1.0 / high
        else:
            answer[n, 0] = -log_p
            if mass > 0.0 and end > first:
                weight, moment = sums[end - 1], moments[end - 1]
                if first > 0:
                    step = math.exp(scaled[first - 1] - scaled[end - 1])
                    weight -= sums[first - 1] * step
                    moment -= moments[first - 1] * step
                answer[n, 1] = moment / weight - own[n]
                answer[n, 2] = first / mass
                answer[n, 3] = (size - end) / mass


@numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=SUMMING)
def dual_bounded(  # noqa: PLR0917 - compiled loops take arrays by position
    scores: Array, labels: Array, counts: Array, weights: Array, threshold: float, answer: Array
) -> None:
    """Add to answer (K + 2,) the loss of `dpb` and its derivatives in the K weights and the threshold.

    Each row counts `counts` (N,) times.

    Without branches, so that the loops over classes become vector instructions.
    """
    count, size = scores.shape
    shifted = np.empty(size)
    by_weights, by_threshold = answer[1 : size + 1], 0.0
    for n in range(count):
        row, label = scores[n], labels[n]
        for k in range(size):
            weighted = weights[k] * row[k]
            clipped = select(weighted > threshold, threshold, weighted)
            clipped = select(clipped < -threshold, -threshold, clipped)
            shifted[k] = row[k] - (weighted - clipped)
        largest = ordered(bits(shifted[0]))
        for k in range(1, size):
            value = ordered(bits(shifted[k]))
            largest = select(value > largest, value, largest)
        anchor = from_bits(ordered(largest))
        own = shifted[label] - anchor
        for k in range(size):
            shifted[k] = fast_exp(shifted[k] - anchor)
        total = 0.0
        for k in range(size):
            total += shifted[k]
        times = counts[n]
        answer[0] += times * (math.log(total) - own)
        share = times * (1.0 / total)
        for k in range(size):
            weighted = weights[k] * row[k]
            side = select(weighted > threshold, 1.0, 0.0) - select(weighted < -threshold, 1.0, 0.0)
            slope = shifted[k] * share * side
            by_weights[k] -= slope * side * row[k]
            by_threshold += slope
        weighted = weights[label] * row[label]
        if abs(weighted) > threshold:
            by_weights[label] += times * row[label]
            by_threshold -= times if weighted > 0.0 else -times
    answer[size + 1] += by_threshold
