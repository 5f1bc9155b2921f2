"""The compiled loop of the calibration test: each bettor's likelihood ratio, and the mixture over them.

A bettor proposes a recalibration q of the probabilities p before it sees the label. Under the hypothesis that
p is the law of the label, E[q(y) / p(y)] <= 1, so every mixture of such ratios is a fair bet against p.
"""

import math
from typing import Any

import numpy as np
from numba import njit

from boxcal.calibrators.operator.compiling import compiled
from boxcal.calibrators.operator.cpu_loops import SUMMING, total_of
from boxcal.calibrators.operator.cpu_math import bits, from_bits, select

Array = np.ndarray[Any, Any]

POWERS = (4, 5, 6, 7, 9, 10, 12, 16)
"""Exponents of the tempered bettors p^beta, in eighths."""

FLOORS = (0.01, 0.03, 0.1)
"""Shares of the uniform distribution in the floor bettors (1 - epsilon) p + epsilon / K."""

BIN_EDGES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)
"""Confidence bins of the bettor with one offset a bin."""

NO_CHANGE = 0
FIRST_FLOOR = 1 + len(POWERS)
BIASES = FIRST_FLOOR + len(FLOORS)
BIASES_AND_TEMPERATURE = BIASES + 1
TOP_LABEL = BIASES + 2
PREDICTED_CLASS = BIASES + 3
CONFIDENCE_BIN = BIASES + 4
CLASS_PRIOR = BIASES + 5
BETTORS = BIASES + 6

CAP = 10.0
"""Largest likelihood ratio that one label may contribute: no single label raises an alarm."""

SHARE = 1e-3
"""Share of the prior that returns into the bettors' weights after each label."""

FORGET = 0.999
STRENGTH = 5.0
"""Weight of a learned bettor's start, in units of its curvature."""

PRIOR_FORGET = 0.9995
PRIOR_COUNT = 1.0
"""Pseudo-count a class of the class-prior bettor."""

MOST_TRAFFIC = math.log(10.0)
"""Largest log factor by which the traffic raises the weight of the class-prior bettor in a bet.

The factor is the likelihood ratio of the recent inputs under the estimated class frequencies (a CUSUM), by
which Bayes' rule multiplies that weight. It is known before the label, so the bet is fair whatever it is.
Harder inputs raise it too, and the stake is then lost where a temperature changes next; hence a limit. On
CIFAR-10, with other seeds than those of the benchmark, limits of 1, 10 and 20 found a label shift after a
median of 172, 119 and 107 labels, and a temperature of 1.5 that followed on harder inputs after 254, 263 and
273.
"""

RUN_DRIFT = 1e-3
"""What each label takes from the run of gains, in nats, that dates the start of a change.

On calm labels the gain is about 0. Without the drift a small run survived thousands of them, and the change
seemed to have begun that much earlier. A run of n labels gained `progress[RUN] + RUN_DRIFT * n`.
"""

TINY = 1e-300
BINS = len(BIN_EDGES) + 1

STRICT, MATERIAL, TAIL, RUN, RUN_COUNT, SEEN, TRAFFIC = range(7)
"""Entries of `progress`: log sums of the two tests, prior mass of later starts, the present run of gains, its
length, how many labels were seen, and the log factor of `MOST_TRAFFIC`."""

BIAS, BIAS_CURVATURE, JOINT_BIAS, JOINT_CURVATURE, CLASS_OFFSET, CLASS_CURVATURE, TRAFFIC_COUNT = range(7)
"""Rows of `by_class`: biases; biases beside a temperature; offset of each predicted class; each with its
curvature; and the expected counts of classes in the recent traffic."""

SLOPE, SLOPE_CURVATURE, TOP_SLOPE, TOP_OFFSET, TOP_A, TOP_B, TOP_C = range(7)
"""Entries of `few`: the temperature's slope - 1 and its curvature; slope - 1 and offset of the top label, and
their curvature, the matrix (A, B; B, C)."""

BIN_OFFSET, BIN_CURVATURE = range(2)
"""Rows of `bins`: offset of each confidence bin and its curvature."""


@compiled
def fold(  # noqa: PLR0915, PLR0917, PLR0912 - one loop over rows, which compiled code takes by position
    probabilities: Array,
    labels: Array,
    shares: Array,
    source: Array,
    weights: Array,
    by_class: Array,
    few: Array,
    bins: Array,
    tolerance: float,
    progress: Array,
    gains: Array,
    evidence: Array,
) -> None:
    """Bet on each label in turn and learn from it.

    Parameters
    ----------
    probabilities, labels
        (N, K) float64 and (N,) int64.
    shares
        (BETTORS,) prior weights, which sum to 1.
    source
        (K,) mean probabilities above 0 where the calibrator was fitted.
    weights
        (BETTORS,) present weights; updated.
    by_class
        (7, K) updated: see `BIAS` and its neighbours.
    few
        (7,) updated: see `SLOPE` and its neighbours.
    bins
        (2, BINS) updated: see `BIN_OFFSET`.
    tolerance
        Recoverable NLL that the second test tolerates, in nats a label.
    progress
        (7,) updated: see `STRICT` and its neighbours.
    gains
        (BETTORS,) updated: log gain of each bettor in the present run.
    evidence
        (N, 2) out: log E of the strict and of the material test after each label.
    """
    size = probabilities.shape[1]
    log_p, first, second, posterior = np.empty(size), np.empty(size), np.empty(size), np.empty(size)
    sums, x = np.empty(len(POWERS)), np.empty(BETTORS)
    for n in range(labels.shape[0]):
        p, y = probabilities[n], labels[n]
        top, confidence = 0, p[0]
        sums[:] = 0.0
        z_first = z_second = z_posterior = total_count = 0.0
        for k in range(size):
            total_count += by_class[TRAFFIC_COUNT, k]
        pseudo = PRIOR_COUNT * size
        # Normalisers of what the bettors propose, in one pass over the classes:
        #   sums[j] = sum_k p_k^beta_j              tempered, beta_j = POWERS[j] / 8, by powers of p^(1/8)
        #   first_k = p_k exp(b_k)                  biases b
        #   second_k = p_k^(1 + s) exp(c_k)         biases c beside a slope 1 + s
        #   posterior_k = p_k target_k / source_k   class frequencies of the recent traffic
        #   target_k = (count_k + pseudo source_k) / (sum_k count_k + pseudo)
        for k in range(size):
            value = max(p[k], TINY)
            if value > confidence:
                top, confidence = k, value
            log_p[k] = math.log(value)
            root = math.exp(0.125 * log_p[k])
            r2 = root * root
            r4 = r2 * r2
            r8 = r4 * r4
            sums[0] += r4
            sums[1] += r4 * root
            sums[2] += r4 * r2
            sums[3] += r4 * r2 * root
            sums[4] += r8 * root
            sums[5] += r8 * r2
            sums[6] += r8 * r4
            sums[7] += r8 * r8
            first[k] = value * math.exp(by_class[BIAS, k])
            second[k] = math.exp((1.0 + few[SLOPE]) * log_p[k] + by_class[JOINT_BIAS, k])
            target = (by_class[TRAFFIC_COUNT, k] + pseudo * source[k]) / (total_count + pseudo)
            posterior[k] = value * target / source[k]
            z_first += first[k]
            z_second += second[k]
            z_posterior += posterior[k]
        # Likelihood ratios x_j = q_j(y) / p(y) of the bettors that propose a whole distribution q_j:
        #   p^beta / sum(p^beta), (1 - eps) p + eps / K, and the three above divided by their sums.
        p_y = max(p[y], TINY)
        x[NO_CHANGE] = 1.0
        for j in range(len(POWERS)):
            x[1 + j] = math.exp((POWERS[j] / 8.0 - 1.0) * log_p[y]) / sums[j]
        for j in range(len(FLOORS)):
            x[FIRST_FLOOR + j] = (1.0 - FLOORS[j]) + FLOORS[j] / (size * p_y)
        x[BIASES] = first[y] / (z_first * p_y)
        x[BIASES_AND_TEMPERATURE] = second[y] / (z_second * p_y)
        x[CLASS_PRIOR] = posterior[y] / (z_posterior * p_y)
        # Those that only change the probability c of the predicted class, logit l = log(c / (1 - c)), to
        #   sigmoid((1 + s) l + o), sigmoid(l + o of the predicted class), sigmoid(l + o of the bin of c)
        # and scale the others alike: x = q / c if the prediction is right, else (1 - q) / (1 - c).
        hit = 1.0 if y == top else 0.0
        confidence = min(max(confidence, 1e-9), 1.0 - 1e-9)
        logit = math.log(confidence / (1.0 - confidence))
        bin_index = 0
        while bin_index < len(BIN_EDGES) and confidence >= BIN_EDGES[bin_index]:
            bin_index += 1
        q_top = _sigmoid((1.0 + few[TOP_SLOPE]) * logit + few[TOP_OFFSET])
        q_class = _sigmoid(logit + by_class[CLASS_OFFSET, top])
        q_bin = _sigmoid(logit + bins[BIN_OFFSET, bin_index])
        x[TOP_LABEL] = q_top / confidence if hit else (1.0 - q_top) / (1.0 - confidence)
        x[PREDICTED_CLASS] = q_class / confidence if hit else (1.0 - q_class) / (1.0 - confidence)
        x[CONFIDENCE_BIN] = q_bin / confidence if hit else (1.0 - q_bin) / (1.0 - confidence)
        # The bet: D = log sum_j v_j min(x_j, CAP), where v are the weights with that of the class prior
        # multiplied by the likelihood ratio of the traffic, exp(progress[TRAFFIC]), and normalised.
        progress[TRAFFIC] = _clip_traffic(progress[TRAFFIC] + math.log(z_posterior))
        ratio = 0.0
        for j in range(BETTORS):
            x[j] = min(x[j], CAP)
            ratio += weights[j] * x[j]
        more = (math.exp(progress[TRAFFIC]) - 1.0) * weights[CLASS_PRIOR]
        gain = math.log((ratio + more * x[CLASS_PRIOR]) / (1.0 + more))
        # Bayes' rule, and a share of the prior: w_j <- (1 - SHARE) w_j x_j / sum(w x) + SHARE shares_j
        for j in range(BETTORS):
            weights[j] = (1.0 - SHARE) * weights[j] * x[j] / ratio + SHARE * shares[j]
        # A mixture over start times t with the prior mass T(t - 1) - T(t), T(t) = log 2 / log(2 + t):
        #   E_t = sum_s (T(s - 1) - T(s)) exp(D_s + ... + D_t) + T(t)
        # The second test bets with D - tolerance.
        progress[SEEN] += 1.0
        tail = math.log(2.0) / math.log(2.0 + progress[SEEN])
        log_start = math.log(progress[TAIL] - tail)
        progress[TAIL] = tail
        progress[STRICT] = gain + np.logaddexp(progress[STRICT], log_start)
        progress[MATERIAL] = gain - tolerance + np.logaddexp(progress[MATERIAL], log_start)
        evidence[n, 0] = np.logaddexp(progress[STRICT], math.log(tail))
        evidence[n, 1] = np.logaddexp(progress[MATERIAL], math.log(tail))
        # The present run of gains (a CUSUM): run <- max(0, run + D - RUN_DRIFT), and what each bettor gained.
        if progress[RUN] + gain > RUN_DRIFT:
            progress[RUN] += gain - RUN_DRIFT
            progress[RUN_COUNT] += 1.0
            for j in range(BETTORS):
                gains[j] += math.log(x[j])
        else:
            progress[RUN] = progress[RUN_COUNT] = 0.0
            gains[:] = 0.0
        # What follows learns from the label, for the bets to come. Biases: the gradient of -log q(y) is
        # q_k - 1{k = y}, its curvature q_k (1 - q_k). Counts of classes: c <- PRIOR_FORGET c + posterior
        mean = slope = curvature = 0.0
        for k in range(size):
            mean += second[k] / z_second * log_p[k]
        for k in range(size):
            q, target = first[k] / z_first, 1.0 if k == y else 0.0
            _learn(by_class, BIAS, k, q - target, q * (1.0 - q))
            q = second[k] / z_second
            slope += (q - target) * log_p[k]
            curvature += q * (log_p[k] - mean) ** 2
            _learn(by_class, JOINT_BIAS, k, q - target, q * (1.0 - q))
            by_class[TRAFFIC_COUNT, k] = (
                PRIOR_FORGET * by_class[TRAFFIC_COUNT, k] + posterior[k] / z_posterior
            )
        # The slope: gradient sum_k (q_k - 1{k = y}) log p_k, curvature the variance of log p under q.
        few[SLOPE_CURVATURE] = FORGET * few[SLOPE_CURVATURE] + curvature
        few[SLOPE] -= (slope + (1.0 - FORGET) * STRENGTH * few[SLOPE]) / (few[SLOPE_CURVATURE] + STRENGTH)
        few[SLOPE] = min(max(few[SLOPE], -0.9), 4.0)
        # Slope and offset of the top label by one Newton step: (A, B; B, C) sums q (1 - q) (l, 1) (l, 1)^T,
        # the gradient is (q - hit) (l, 1).
        error, spread = q_top - hit, q_top * (1.0 - q_top)
        few[TOP_A] = FORGET * few[TOP_A] + spread * logit * logit
        few[TOP_B] = FORGET * few[TOP_B] + spread * logit
        few[TOP_C] = FORGET * few[TOP_C] + spread
        a, b, c = few[TOP_A] + STRENGTH, few[TOP_B], few[TOP_C] + STRENGTH
        by_slope = error * logit + (1.0 - FORGET) * STRENGTH * few[TOP_SLOPE]
        by_offset = error + (1.0 - FORGET) * STRENGTH * few[TOP_OFFSET]
        determinant = a * c - b * b
        few[TOP_SLOPE] -= (c * by_slope - b * by_offset) / determinant
        few[TOP_OFFSET] -= (a * by_offset - b * by_slope) / determinant
        few[TOP_SLOPE] = min(max(few[TOP_SLOPE], -0.9), 4.0)
        _learn(by_class, CLASS_OFFSET, top, q_class - hit, q_class * (1.0 - q_class))
        _learn(bins, BIN_OFFSET, bin_index, q_bin - hit, q_bin * (1.0 - q_bin))


@njit(error_model="numpy")
def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))


@njit(error_model="numpy")
def _learn(table: Array, row: int, place: int, gradient: float, curvature: float) -> None:
    """Take one Newton step with forgetting, for a parameter in `row` whose curvature is in the next row.

    h <- FORGET h + curvature;  w <- w - (gradient + (1 - FORGET) STRENGTH w) / (h + STRENGTH)
    """
    table[row + 1, place] = FORGET * table[row + 1, place] + curvature
    table[row, place] -= (gradient + (1.0 - FORGET) * STRENGTH * table[row, place]) / (
        table[row + 1, place] + STRENGTH
    )


@compiled
def observe(probabilities: Array, source: Array, counts: Array, progress: Array, confidences: Array) -> None:
    """Learn the class frequencies of traffic from rows (N, K) without labels, as `fold` does.

    `counts` (K,) and the entry `TRAFFIC` of `progress` are updated; `confidences` (N,) gets the largest
    probability of each row.
    """
    size = probabilities.shape[1]
    pseudo, inverse = PRIOR_COUNT * size, 1.0 / source
    for n in range(probabilities.shape[0]):
        p, total = probabilities[n], total_of(counts)
        largest = bits(p[0])  # of numbers of at least 0, which sort as their bits do
        for k in range(1, size):
            value = bits(p[k])
            largest = select(value > largest, value, largest)
        confidences[n] = from_bits(largest)
        mass = _posterior_mass(p, counts, inverse, pseudo)
        progress[TRAFFIC] = _clip_traffic(progress[TRAFFIC] + math.log(mass / (total + pseudo)))
        share = 1.0 / mass
        for k in range(size):
            posterior = p[k] * (counts[k] * inverse[k] + pseudo)
            counts[k] = PRIOR_FORGET * counts[k] + posterior * share


@njit(error_model="numpy", fastmath=SUMMING)
def _posterior_mass(p: Array, counts: Array, inverse: Array, pseudo: float) -> float:
    """Return the sum of what `observe` learns from a row, before it is normalised.

    A loop that also stored it would sum in another order where arrays happen to lie close together.
    """
    mass = 0.0
    for k in range(p.shape[0]):
        mass += p[k] * (counts[k] * inverse[k] + pseudo)
    return mass


@compiled
def _clip_traffic(value: float) -> float:
    """Keep the log factor of `MOST_TRAFFIC` in its range: a CUSUM begins anew at 0."""
    return min(max(value, 0.0), MOST_TRAFFIC)
