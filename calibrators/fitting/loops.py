"""Compiled loops of fits: losses of rows and their derivatives."""

import math
from functools import partial
from typing import Any

import numpy as np
from numba import njit

from boxcal.calibrators.operator.compiling import compiled
from boxcal.calibrators.operator.constants import AT_LOWER, AT_UPPER, FREE
from boxcal.calibrators.operator.cpu_loops import SUMMING
from boxcal.calibrators.operator.cpu_loops import solve_row as solve_in_box
from boxcal.calibrators.operator.cpu_math import bits, fast_exp, from_bits, ordered, select
from boxcal.calibrators.operator.uniform import VERTEX, one_each, solve_row

Array = np.ndarray[Any, Any]

FAINT = -660.0
"""Logits below which weights are close to the least number of float64."""


@njit(fastmath=SUMMING, error_model="numpy")
def _weigh(row: Array, factor: Any, scaled: Array, weights: Array) -> tuple[float, float]:
    """Fill scaled = factor row and weights = exp(scaled).

    Returns the sums of weights and of weights row.
    """
    total, moment = row.dtype.type(0), row.dtype.type(0)
    for k in range(len(row)):
        scaled[k] = row[k] * factor
        weights[k] = fast_exp(scaled[k])
        total += weights[k]
        moment += weights[k] * row[k]
    return float(total), float(moment)


@njit(fastmath=SUMMING, error_model="numpy")
def _mean(row: Array, weights: Array) -> float:
    """Return the mean of a row with some weights."""
    total, moment = row.dtype.type(0), row.dtype.type(0)
    for k in range(len(row)):
        total += weights[k]
        moment += weights[k] * row[k]
    return float(moment) / float(total)


@njit(error_model="numpy")
def _add_up(row: Array, scaled: Array, sums: Array, moments: Array) -> None:
    """Fill sums of exp(scaled), and of that times logits, up to each place over exp(scaled) there."""
    total, moment, before = 0.0, 0.0, -math.inf
    for k in range(len(row)):
        step = math.exp(before - scaled[k])
        total = 1.0 + total * step
        moment = row[k] + moment * step
        sums[k], moments[k] = total, moment
        before = scaled[k]


@njit(error_model="numpy")
def _mean_between(scaled: Array, sums: Array, moments: Array, first: int, end: int) -> float:
    """Return the mean of a row from one place up to another, by what `_add_up` has found."""
    weight, moment = sums[end - 1], moments[end - 1]
    if first > 0:
        step = math.exp(scaled[first - 1] - scaled[end - 1])
        weight -= sums[first - 1] * step
        moment -= moments[first - 1] * step
    return float(moment / weight)


@compiled
def tempered_in_box(  # noqa: PLR0917 - compiled loops take arrays by position
    ascending: Array,
    own: Array,
    inverse: Array,
    lower: Array,
    upper: Array,
    cuts: Array,
    answer: Array,
) -> None:
    """Fill answer (N, 4): each row's loss, and its derivatives in 1 / temperature and in both bounds.

    `ascending` (N, K) are rows of logits less their largest; `own` (N,) is the label's; `inverse`, `lower`,
    `upper` (N,) are each row's 1 / temperature and bounds. `cuts` (N, 2) holds where each row met the bounds
    of the last call, and is brought up to date.
    """
    count, size = ascending.shape
    kind = ascending.dtype.type
    before = one_each(size)
    scaled, weights = np.empty(size, ascending.dtype), np.empty(size, ascending.dtype)
    sums, moments = np.empty(size), np.empty(size)
    for n in range(count):
        row, low, high, factor = ascending[n], lower[n], upper[n], inverse[n]
        log_low = math.log(low) if low > 0.0 else -math.inf
        log_high = math.log(high)
        total, moment = _weigh(row, kind(factor), scaled, weights)
        score = own[n] * factor
        log_scale = -math.log(total)
        answer[n, 1], answer[n, 2], answer[n, 3] = 0.0, 0.0, 0.0
        if scaled[0] + log_scale >= log_low and log_scale <= log_high:
            answer[n, 0] = -score - log_scale
            answer[n, 1] = moment / total - own[n]
            continue
        # Weights too small for the number format matter only where the other classes cannot take all mass.
        few = np.searchsorted(scaled, FAINT) if scaled[0] < FAINT else 0
        others = before[size] - before[few]
        is_weighed = few == 0 or before[few] * low + others * high > 1.0 + VERTEX
        if not is_weighed:
            _add_up(row, scaled, sums, moments)
        log_scale, first, end, mass = solve_row(
            scaled,
            sums,
            weights if is_weighed else weights[:0],
            before,
            low,
            high,
            log_low,
            log_high,
            cuts[n, 0],
            cuts[n, 1],
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
                if is_weighed:
                    mean = _mean(row[first:end], weights[first:end])
                else:
                    mean = _mean_between(scaled, sums, moments, first, end)
                answer[n, 1] = mean - own[n]
                answer[n, 2] = before[first] / mass
                answer[n, 3] = (before[size] - before[end]) / mass


@partial(compiled, fastmath=SUMMING)
def dual_bounded(  # noqa: PLR0917 - compiled loops take arrays by position
    scores: Array, labels: Array, counts: Array, weights: Array, threshold: Any, answer: Array
) -> None:
    """Add to answer (K + 2,) the loss of `dpb` and its derivatives in the K weights and the threshold.

    Each row counts `counts` (N,) times. Rows are computed in the precision of `weights` and `threshold`, at
    least that of `scores`; sums over rows in float64.

    Without branches, so that the loops over classes become vector instructions.
    """
    count, size = scores.shape
    kind = weights.dtype.type
    shifted = np.empty(size, weights.dtype)
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
        total, moved = kind(0), kind(0)
        for k in range(size):
            total += shifted[k]
        times = counts[n]
        answer[0] += times * (math.log(total) - own)
        share = kind(times / total)
        for k in range(size):
            weighted = weights[k] * row[k]
            side = select(weighted > threshold, kind(1), kind(0))
            side -= select(weighted < -threshold, kind(1), kind(0))
            slope = shifted[k] * share * side
            by_weights[k] -= slope * side * row[k]
            moved += slope
        by_threshold += moved
        weighted = weights[label] * row[label]
        if abs(weighted) > threshold:
            by_weights[label] += times * row[label]
            by_threshold -= times if weighted > 0.0 else -times
    answer[size + 1] += by_threshold


SMALLEST = 1e-300
"""Stands for a probability or a mass of 0, so that losses and derivatives stay finite."""


@compiled
def nll_rows(  # noqa: PLR0917 - compiled loops take arrays by position
    scores: Array,
    labels: Array,
    lower: Array,
    upper: Array,
    losses: Array,
    by_scores: Array,
    by_lower: Array,
    by_upper: Array,
) -> None:
    """Fill the loss of every row, in nats, and its derivatives.

    With s the mass of the classes that no bound holds, q their probabilities, and n_a and n_b the numbers of
    classes at a and b, a free label y has the derivatives q / s - 1{y}, n_a / s and n_b / s.

    `scores`, `by_scores`: float64 ndarray of shape (N, K). `labels`: int64 ndarray of shape (N,). `lower`,
    `upper`: float64 ndarray of shape (N,), one feasible box per row, for all its classes. `losses`,
    `by_lower`, `by_upper`: float64 ndarray of shape (N,).
    """
    side = np.empty(scores.shape[1], np.int8)
    for n in range(scores.shape[0]):
        row, p, y = scores[n], by_scores[n], labels[n]
        solve_in_box(row, lower[n], upper[n], 1.0, 1e-9, p, side)
        by_lower[n] = by_upper[n] = 0.0
        if side[y] == AT_LOWER:
            losses[n], by_lower[n] = -math.log(lower[n]), -1.0 / lower[n]
            p[:] = 0.0
        elif side[y] == AT_UPPER:
            losses[n], by_upper[n] = -math.log(upper[n]), -1.0 / upper[n]
            p[:] = 0.0
        else:
            mass, below, above, largest = 0.0, 0, 0, y
            for k in range(row.shape[0]):
                below += side[k] == AT_LOWER
                above += side[k] == AT_UPPER
                if side[k] == FREE:
                    mass += p[k]
                    if row[k] > row[largest]:
                        largest = k
            losses[n] = row[largest] - row[y] - math.log(max(p[largest], SMALLEST))
            inverse = 1.0 / max(mass, SMALLEST)
            by_lower[n], by_upper[n] = below * inverse, above * inverse
            for k in range(row.shape[0]):
                p[k] = p[k] * inverse if side[k] == FREE else 0.0
            p[y] -= 1.0
