"""Compiled loops of `closed_form_gradients`: losses of rows and their derivatives."""

import math
from typing import Any

import numpy as np
from numba import njit

from boxcal.calibrators.operator.compiling import compiled
from boxcal.calibrators.operator.cpu_loops import SUMMING
from boxcal.calibrators.operator.cpu_math import bits, fast_exp, from_bits, ordered, select
from boxcal.calibrators.operator.uniform import VERTEX, one_each, solve_row

Array = np.ndarray[Any, Any]

LEAST = -700.0
"""Logits in a mixture are kept this close to the largest of their row, so that no weight is zero."""
FAINT, FAINT_32 = -660.0, -70.0
"""Logits below which weights are close to the least number of float64 and of float32."""
TINY = 1e-300
"""Probabilities in a mixture are kept above this, so that their logarithms are finite."""


@njit(fastmath=SUMMING, error_model="numpy")
def _weigh(row: Array, counts: Array, factor: Any, scaled: Array, weights: Array) -> tuple[float, float]:
    """Fill scaled = factor row and weights = counts exp(scaled).

    Returns the sums of weights and of weights row.
    """
    total, moment = row.dtype.type(0), row.dtype.type(0)
    for k in range(len(row)):
        scaled[k] = row[k] * factor
        weights[k] = fast_exp(scaled[k]) * counts[k]
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
def _add_up(row: Array, counts: Array, scaled: Array, sums: Array, moments: Array) -> None:
    """Fill sums of counts exp(scaled), and of that times logits, up to each place over exp(scaled) there."""
    total, moment, before = 0.0, 0.0, -math.inf
    for k in range(len(row)):
        step = math.exp(before - scaled[k])
        total = counts[k] + total * step
        moment = counts[k] * row[k] + moment * step
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
    counts: Array,
    own: Array,
    inverse: Array,
    lower: Array,
    upper: Array,
    cuts: Array,
    answer: Array,
) -> None:
    """Fill answer (N, 4): each row's loss, and its derivatives in 1 / temperature and in both bounds.

    `ascending` (N, T), float32 or float64, are rows of logits less their largest; entry k stands for
    `counts` (T,)[k] classes. `own` (N,) is the label's logit less the largest; `inverse`, `lower`, `upper`
    (N,) are each row's 1 / temperature and bounds. `cuts` (N, 2) holds where each row met the bounds of the
    last call, and is brought up to date.
    """
    count, size = ascending.shape
    kind = ascending.dtype.type
    before = np.zeros(size + 1)
    before[1:] = np.cumsum(counts)
    faint = FAINT if ascending.itemsize > 4 else FAINT_32
    scaled, weights = np.empty(size, ascending.dtype), np.empty(size, ascending.dtype)
    sums, moments = np.empty(size), np.empty(size)
    for n in range(count):
        row, low, high, factor = ascending[n], lower[n], upper[n], inverse[n]
        log_low = math.log(low) if low > 0.0 else -math.inf
        log_high = math.log(high)
        total, moment = _weigh(row, counts, kind(factor), scaled, weights)
        score = own[n] * factor
        log_scale = -math.log(total)
        answer[n, 1], answer[n, 2], answer[n, 3] = 0.0, 0.0, 0.0
        if scaled[0] + log_scale >= log_low and log_scale <= log_high:
            answer[n, 0] = -score - log_scale
            answer[n, 1] = moment / total - own[n]
            continue
        # Weights too small for the number format matter only where the other classes cannot take all mass.
        few = np.searchsorted(scaled, faint) if scaled[0] < faint else 0
        others = before[size] - before[few]
        is_weighed = few == 0 or before[few] * low + others * high > 1.0 + VERTEX
        if not is_weighed:
            _add_up(row, counts, scaled, sums, moments)
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


@compiled(fastmath=SUMMING)
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


@compiled(fastmath=SUMMING)
def clipped_and_tempered(  # noqa: PLR0917 - compiled loops take arrays by position
    scores: Array,
    labels: Array,
    norms: Array,
    largest: Array,
    inverse: Array,
    lower: float,
    upper: float,
    answer: Array,
) -> None:
    """Fill answer (N, 4): each row's loss under `softmax(inverse * clip(z, lower |z|, upper |z|))`.

    And its derivatives in 1 / temperature and in both limits. `norms` and `largest` (N,) are |z| and the
    largest entries of the rows. Without branches, as `dual_bounded`.
    """
    count, size = scores.shape
    for n in range(count):
        row, label, norm, factor = scores[n], labels[n], norms[n], inverse[n]
        low, high = lower * norm, upper * norm
        anchor = min(max(largest[n], low), high)
        total, moment, at_low, at_high = 0.0, 0.0, 0.0, 0.0
        for k in range(size):
            here = select(row[k] < low, low, row[k])
            here = select(here > high, high, here) - anchor
            weight = fast_exp(here * factor)
            total += weight
            moment += weight * here
            at_low += select(row[k] < low, weight, 0.0)
            at_high += select(row[k] > high, weight, 0.0)
        own = min(max(row[label], low), high) - anchor
        by_low, by_high = at_low / total, at_high / total
        if row[label] < low:
            by_low -= 1.0
        elif row[label] > high:
            by_high -= 1.0
        answer[n, 0] = math.log(total) - own * factor
        answer[n, 1] = moment / total - own
        answer[n, 2] = by_low * factor * norm
        answer[n, 3] = by_high * factor * norm


@compiled
def mixed_in_box(  # noqa: PLR0917 - compiled loops take arrays by position
    ascending: Array,
    softened: Array,
    raw: Array,
    own: Array,
    own_parts: Array,
    mean: Array,
    lower: Array,
    upper: Array,
    shares: Array,
    cuts: Array,
    answer: Array,
) -> None:
    """Fill answer (N, 7): the loss of each row of a mixture in its box, and its derivatives.

    These are in 1 / temperature, in the three shares, and in both bounds. The mixture of the rows (N, K)
    `softened`, `raw` and 1/K is ascending; `own_parts` (N, 3) are the label's entries, `mean` (N,) is the
    mean of the scores `ascending` under `softened`, and `own` (N,) the label's score. `cuts` are as in
    `tempered_in_box`.
    """
    count, size = ascending.shape
    scaled, sums, mixed, before = np.empty(size), np.empty(size), np.empty(size), one_each(size)
    for n in range(count):
        low, high, running = lower[n], upper[n], 0.0
        for k in range(size):
            mixed[k] = max(shares[0] * softened[n, k] + shares[1] * raw[n, k] + shares[2] / size, TINY)
            running += mixed[k]
            sums[k] = running / mixed[k]
        largest = mixed[size - 1]
        for k in range(size):
            scaled[k] = math.log(mixed[k] / largest)
        log_low, log_high = math.log(low) if low > 0.0 else -math.inf, math.log(high)
        log_scale, first, end, mass = solve_row(
            scaled, sums, sums[:0], before, low, high, log_low, log_high, cuts[n, 0], cuts[n, 1]
        )
        cuts[n, 0], cuts[n, 1] = first, end
        answer[n, 1:] = 0.0
        parts = own_parts[n]
        own_mixed = max(shares[0] * parts[0] + shares[1] * parts[1] + shares[2] * parts[2], TINY)
        log_p = math.log(own_mixed / largest) + log_scale
        if first > 0 and log_p < log_low:
            answer[n, 0], answer[n, 5] = -log_low, -1.0 / low
        elif end < size and log_p > log_high:
            answer[n, 0], answer[n, 6] = -log_high, -1.0 / high
        else:
            answer[n, 0] = -log_p
            if mass > 0.0 and end > first:
                total, by_softened, by_raw, moment = 0.0, 0.0, 0.0, 0.0
                for k in range(first, end):
                    total += mixed[k]
                    by_softened += softened[n, k]
                    by_raw += raw[n, k]
                    moment += softened[n, k] * (ascending[n, k] - mean[n])
                moved = parts[0] * (own[n] - mean[n])
                answer[n, 1] = shares[0] * (moment / total - moved / own_mixed)
                answer[n, 2] = by_softened / total - parts[0] / own_mixed
                answer[n, 3] = by_raw / total - parts[1] / own_mixed
                answer[n, 4] = (end - first) / (size * total) - parts[2] / own_mixed
                answer[n, 5] = first / mass
                answer[n, 6] = (size - end) / mass


@compiled
def clipped_mixture(  # noqa: PLR0917 - compiled loops take arrays by position
    ascending: Array,
    softened: Array,
    raw: Array,
    own: Array,
    own_softened: Array,
    own_raw: Array,
    mean: Array,
    shares: Array,
    lower: float,
    upper: float,
    answer: Array,
) -> None:
    """Fill answer (N, 7): the loss of softmax(clip(z, lower |z|, upper |z|)), z the log of a mixture.

    And its derivatives in 1 / temperature, in the three shares and in both limits; arrays as `mixed_in_box`.
    """
    count, size = ascending.shape
    mixed, logs, weights = np.empty(size), np.empty(size), np.empty(size)
    for n in range(count):
        square = 0.0
        for k in range(size):
            mixed[k] = max(shares[0] * softened[n, k] + shares[1] * raw[n, k] + shares[2] / size, TINY)
            logs[k] = math.log(mixed[k])
            square += logs[k] * logs[k]
        norm = max(math.sqrt(square), TINY)
        low, high = lower * norm, upper * norm
        anchor = min(max(logs[size - 1], low), high)
        total = 0.0
        for k in range(size):
            weights[k] = math.exp(max(min(max(logs[k], low), high) - anchor, LEAST))
            total += weights[k]
        own_mixed = max(shares[0] * own_softened[n] + shares[1] * own_raw[n] + shares[2] / size, TINY)
        score, by_low, by_high, by_own = math.log(own_mixed), 0.0, 0.0, 0.0
        if score < low:
            by_low = -1.0
        elif score > high:
            by_high = -1.0
        else:
            by_own = -1.0 / own_mixed
        for k in range(size):
            if logs[k] < low:
                by_low += weights[k] / total
            elif logs[k] > high:
                by_high += weights[k] / total
        by_norm = lower * by_low + upper * by_high
        by_softened, by_raw, by_even, moment = 0.0, 0.0, 0.0, 0.0
        for k in range(size):
            slope = by_norm * logs[k] / norm
            if low <= logs[k] <= high:
                slope += weights[k] / total
            slope /= mixed[k]
            by_softened += slope * softened[n, k]
            by_raw += slope * raw[n, k]
            by_even += slope / size
            moment += slope * softened[n, k] * (ascending[n, k] - mean[n])
        answer[n, 0] = math.log(total) + anchor - min(max(score, low), high)
        moment += by_own * own_softened[n] * (own[n] - mean[n])
        answer[n, 1] = shares[0] * moment
        answer[n, 2] = by_softened + by_own * own_softened[n]
        answer[n, 3] = by_raw + by_own * own_raw[n]
        answer[n, 4] = by_even + by_own / size
        answer[n, 5], answer[n, 6] = by_low * norm, by_high * norm
