"""Compiled loops of `closed_form_gradients`: sums over rows of the loss and its derivatives."""

import math
from typing import Any

import numba
import numpy as np

from boxcal.calibrators.operator.uniform import solve_row

Array = np.ndarray[Any, Any]

LEAST = -700.0
"""Logits are kept this close to the largest of their row, so that no weight is zero."""


@numba.njit(nogil=True, cache=True, error_model="numpy")
def tempered_in_box(  # noqa: PLR0917 - compiled loops take arrays by position
    ascending: Array, own: Array, cuts: Array, inverse: float, lower: float, upper: float
) -> tuple[float, float, float, float]:
    """Loss of `ts+pb` and its derivatives in the inverse temperature and both bounds.

    `ascending` (N, K) are rows of logits less their largest, `own` (N,) the label's entry of them; `cuts`
    (N, 2) holds where each row met the bounds of the last call, and is brought up to date.
    """
    count, size = ascending.shape
    scaled, sums, moments = np.empty(size), np.empty(size), np.empty(size)
    loss, by_inverse, by_lower, by_upper = 0.0, 0.0, 0.0, 0.0
    log_lower = math.log(lower) if lower > 0.0 else -math.inf
    log_upper = math.log(upper)
    for n in range(count):
        before, total, moment = -math.inf, 0.0, 0.0
        for k in range(size):
            here = max(ascending[n, k] * inverse, LEAST)
            step = math.exp(before - here)
            total = 1.0 + total * step
            moment = ascending[n, k] + moment * step
            scaled[k], sums[k], moments[k] = here, total, moment
            before = here
        score = max(own[n] * inverse, LEAST)
        log_scale = -math.log(total)
        if scaled[0] + log_scale >= log_lower and log_scale <= log_upper:
            loss -= score + log_scale
            by_inverse -= own[n] - moment / total
            continue
        log_scale, first, end, mass = solve_row(
            scaled, sums, lower, upper, log_lower, log_upper, cuts[n, 0], cuts[n, 1]
        )
        cuts[n, 0], cuts[n, 1] = first, end
        log_p = score + log_scale
        if first > 0 and log_p < log_lower:
            loss -= log_lower
            by_lower -= 1.0 / lower
        elif end < size and log_p > log_upper:
            loss -= log_upper
            by_upper -= 1.0 / upper
        else:
            loss -= log_p
            if mass > 0.0 and end > first:
                weight, moment = sums[end - 1], moments[end - 1]
                if first > 0:
                    step = math.exp(scaled[first - 1] - scaled[end - 1])
                    weight -= sums[first - 1] * step
                    moment -= moments[first - 1] * step
                by_inverse -= own[n] - moment / weight
                by_lower += first / mass
                by_upper += (size - end) / mass
    return loss, by_inverse, by_lower, by_upper


@numba.njit(nogil=True, cache=True, error_model="numpy")
def label_probabilities(scores: Array, labels: Array, inverse: float, answer: Array) -> None:
    """Fill answer (N, 2) with softmax(inverse * scores) at the label, and its derivative in `inverse`."""
    count, size = scores.shape
    for n in range(count):
        largest = scores[n, 0]
        for k in range(1, size):
            largest = max(largest, scores[n, k])
        total, moment = 0.0, 0.0
        for k in range(size):
            score = scores[n, k] - largest
            weight = math.exp(score * inverse)
            total += weight
            moment += weight * score
        own = scores[n, labels[n]] - largest
        answer[n, 0] = math.exp(own * inverse) / total
        answer[n, 1] = answer[n, 0] * (own - moment / total)


@numba.njit(nogil=True, cache=True, error_model="numpy")
def dual_bounded(scores: Array, labels: Array, weights: Array, threshold: float, answer: Array) -> None:
    """Add to answer (K + 2,) the loss of `dpb` and its derivatives in the K weights and the threshold."""
    count, size = scores.shape
    shifted, sides = np.empty(size), np.empty(size)
    for n in range(count):
        largest = -math.inf
        for k in range(size):
            weighted = weights[k] * scores[n, k]
            excess, side = 0.0, 0.0
            if weighted > threshold:
                excess, side = weighted - threshold, 1.0
            elif weighted < -threshold:
                excess, side = weighted + threshold, -1.0
            shifted[k], sides[k] = scores[n, k] - excess, side
            largest = max(largest, shifted[k])
        total, own = 0.0, shifted[labels[n]] - largest
        for k in range(size):
            shifted[k] = math.exp(shifted[k] - largest)
            total += shifted[k]
        answer[0] += math.log(total) - own
        for k in range(size):
            if sides[k] != 0.0:
                slope = shifted[k] / total
                if k == labels[n]:
                    slope -= 1.0
                answer[1 + k] -= slope * scores[n, k]
                answer[1 + size] += slope * sides[k]
