"""Whether labels belong to their logits: statistics for the checks of validation data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.array_ops import log_softmax, row_max, row_sum, softmax
from boxcal.calibrators.threads import block_rows, over_blocks

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

MOST_ROWS = 10_000
"""Largest number of rows on which association and the share of unrelated labels are estimated."""
RARELY = 2.33
"""The 99 % quantile of N(0, 1)."""
WEAK_ASSOCIATION = 0.18
"""Association of a weak model, divided by the root of the number of samples."""
RARE_ASSOCIATION = 0.74
"""The same of two classes whose logits rank a sample of the rarer one first in 70 %, divided by the root of
N p (1 - p): of rare events, so few show less than the model above."""
FEWEST_FOR_HALVES = 10
"""Number of classes from which `looks_random` can tell a weak model from wrong labels."""
FACTORS = tuple(4.0 ** (step / 6) for step in range(-6, 7))
"""Inverse temperatures that rows may have, of the best single one."""
MOST_PASSES, SAME_WEIGHT = 2000, 1e-7
"""Of the EM algorithm at most, and the change of the weights at which it ends."""
ALIKE = 1e-9
"""Standard deviation of log odds, of the largest, up to which the rows are alike and show no intercept."""
STEPS, STILL, STEEPEST = 50, 1e-10, 1e3
"""Of Newton's method at most, the step at which it ends, and the slope beyond which there is none."""
SHARPEST, FLATTEST = 5.0, 0.2
"""Inverse temperatures between which logits say something about class frequencies."""
MOST_ASKED, MOST_DISTANCES, MOST_SHARES, FEWEST_ASKED = 1000, 200_000_000, 4_000_000, 100
"""Rows whose nearest rows are looked for at most, entries of what that takes, and rows at least."""
DIRECTIONS = 16
"""Random directions in which rows with more classes are compared."""
FARTHER = range(9, 30, 4)
"""Ranks of the rows beside which the nearest is judged, from 0."""
SIDE, FAR_AWAY = 4096, 1e4
"""Rows that are compared at once, and where coordinates are cut off, of their median."""
MOST_DESCENTS = 1000
"""Steps towards the class offsets at most, of which 200 classes with 25 samples each take 60."""
OFFSET_SPREAD = 3.0
"""Standard deviation of the normal prior of class offsets, in nats: what samples do not show stays near 0."""


def _some(logits: NDArray[Any], labels: Labels) -> tuple[Floats, Labels]:
    """Draw the rows on which a check estimates: labels that follow a pattern are seen as they are."""
    if len(logits) <= MOST_ROWS:
        return logits.astype(np.float64), labels
    rows = np.sort(np.random.default_rng(0).choice(len(logits), MOST_ROWS, replace=False))
    return logits[rows].astype(np.float64), labels[rows]


def mean_confidence(logits: NDArray[Any]) -> float:
    """Mean of the largest softmax probability."""
    total = 0.0
    for part in np.array_split(logits, -(-logits.size // 2_000_000)):
        rows = part.astype(np.float64)
        total += float((1 / row_sum(np.exp(rows - row_max(rows)))).sum())
    return total / len(logits)


def association(logits: NDArray[Any], labels: Labels) -> float:
    """Measure how far the logits of the true classes exceed those of permuted labels, in standard deviations.

    With p_k the share of class k, and d_ik the logit g_ik less its row mean sum_k p_k g_ik and less the mean
    of its column (of rows so centred), the statistic sum_i d_i,y(i) has mean 0 over all permutations of the
    labels, and variance N / (N - 1) sum_ik p_k d_ik^2 (Hoeffding 1951, theorem 2). It does not change with
    the temperature, nor with offsets of classes, and is near N(0, 1) where labels and logits are independent.
    """
    scores, truth = _some(logits, labels)
    count, num_classes = scores.shape
    shares = np.bincount(truth, minlength=num_classes) / count
    scores -= (scores @ shares)[:, None]
    scores -= scores.mean(axis=0)
    variance = float(((scores**2) @ shares).sum()) * count / (count - 1)
    total = float(scores[np.arange(count), truth].sum())
    return total / math.sqrt(variance) if variance > 0 else 0.0


def is_associated(logits: NDArray[Any], labels: Labels) -> bool:
    """Whether labels and logits are associated, or too few to show that they are not.

    They are not where the association is below the 1 % level of permuted labels, and below what weak models
    show in 99 % of sets: one of three classes whose accuracy is .4, or of two whose area under the curve is
    .7. Of more classes, N p (1 - p) is the half of N (1 - sum p_k^2).
    """
    found, count = association(logits, labels), min(len(labels), MOST_ROWS)
    shares = np.bincount(labels) / len(labels)
    events = count * (1.0 - float(shares @ shares)) / 2
    weak = min(WEAK_ASSOCIATION * math.sqrt(count), RARE_ASSOCIATION * math.sqrt(events))
    return found >= min(RARELY, weak - RARELY)


def looks_random(logits: NDArray[Any], labels: Labels) -> bool:
    """Whether the true class is in the lower half of its row at least half as often as a random class.

    Labels that were shifted to a similar class are associated with the logits, but are often in that half. So
    are those of weak models of fewer than 10 classes, for which it is not asked.
    """
    num_classes = logits.shape[1]
    if num_classes < FEWEST_FOR_HALVES:
        return False
    half = num_classes // 2
    own = logits[np.arange(len(labels)), labels]
    parts = np.array_split(logits, -(-logits.size // 2_000_000))
    middle = np.concatenate([np.partition(rows, half, axis=1)[:, half] for rows in parts])
    return bool((own < middle).mean() >= half / num_classes / 2)


def unrelated_share(logits: NDArray[Any], labels: Labels) -> tuple[float, float]:
    """Estimate the share of labels that are drawn uniformly at random, independently of the logits.

    The maximum-likelihood estimate of e in the mixture (1 - e) softmax(g / T) + e / K over the K classes that
    occur among the labels, where rows have several T around the best single one: a model that is too sure of
    some of its rows needs no wrong labels. Rows whose true class is at a minimum that classes share are
    excluded: a forest's zeros, or clipped values.

    Returns the estimate, and the significance of e beside the best single T, in standard errors: the root of
    twice the gain in log-likelihood.
    """
    from scipy.optimize import brentq, minimize_scalar  # noqa: PLC0415 - only fits need scipy

    present, truth = np.unique(labels, return_inverse=True)
    uniform = 1 / len(present)
    scores, truth = _some(logits, truth)
    if len(present) < logits.shape[1]:
        scores = scores[:, present]
    own, least = scores[np.arange(len(scores)), truth], scores.min(axis=1)
    kept = (own > least) | ((scores == least[:, None]).sum(axis=1) == 1)
    if len(present) < 3 or not kept.any():
        return 0.0, 0.0
    top = scores[kept].max(axis=1)
    scores, own = scores[kept] - top[:, None], own[kept] - top
    spread = float(-scores.mean()) or 1.0  # the best temperature is near it, whatever the logits' unit
    scores, own = scores / spread, own / spread

    def probabilities(log_inverse: float) -> Floats:
        inverse = math.exp(log_inverse)
        own_share: Floats = np.exp(inverse * own) / np.exp(inverse * scores).sum(axis=1)
        return np.maximum(own_share, 1e-300)

    def share(own_share: Floats) -> float:
        def slope(e: float) -> float:
            return float(((uniform - own_share) / ((1 - e) * own_share + e * uniform)).mean())

        if slope(0.0) <= 0:
            return 0.0
        return 1.0 if slope(1.0) >= 0 else float(brentq(slope, 0.0, 1.0, xtol=1e-6))

    def loss(own_share: Floats, e: float) -> float:
        return -float(np.log((1 - e) * own_share + e * uniform).mean())

    def mixed(log_inverse: float) -> float:
        own_share = probabilities(log_inverse)
        return loss(own_share, share(own_share))

    plain, both = (
        minimize_scalar(one, bounds=(-5.0, 5.0), method="bounded", options={"xatol": 1e-3})
        for one in (lambda log_inverse: loss(probabilities(log_inverse), 0.0), mixed)
    )
    if share(probabilities(both.x)) == 0.0:
        return 0.0, 0.0
    gain = 2 * len(own) * (plain.fun - both.fun)
    several = [probabilities(both.x + math.log(factor)) for factor in FACTORS]
    return _last_weight(np.stack([*several, np.full(len(own), uniform)])), math.sqrt(max(0.0, gain))


def _last_weight(densities: Floats) -> float:
    """Give the weight of the last of M components, whose densities at N points are (M, N), by EM."""
    weights = np.full(len(densities), 1.0 / len(densities))
    for _ in range(MOST_PASSES):
        before = weights
        weights = before * (densities / (before @ densities)).mean(axis=1)
        if np.abs(weights - before).max() < SAME_WEIGHT:
            break
    return float(weights[-1])


class Regression(NamedTuple):
    """A logistic regression on N samples and M inputs."""

    coefficients: Floats  # (M,)
    covariance: NDArray[Any]  # Inverse of their information (M, M)
    probabilities: Floats  # Of the event (N,)


def logistic(inputs: Floats, offset: Floats, events: Floats, weights: Floats) -> Regression | None:
    """Fit a logistic regression of events (N,), 0 or 1, on inputs (N, M); None if there is no optimum.

    `offset`: log odds (N,) that are given. `weights`: (N,). Newton's method from 0, where no probability is
    so near to 0 or 1 that its curvature vanishes; the first input is the constant 1.
    """
    if not 0.0 < weights @ events < weights.sum():
        return None
    point = np.zeros(inputs.shape[1])
    for _ in range(STEPS):
        with np.errstate(over="ignore"):
            p = 1.0 / (1.0 + np.exp(-(offset + inputs @ point)))
        information = inputs.T @ ((weights * p * (1.0 - p))[:, None] * inputs)
        if not np.isfinite(information).all() or np.linalg.matrix_rank(information) < len(point):
            return None
        step = np.linalg.solve(information, inputs.T @ (weights * (events - p)))
        step *= min(1.0, 4.0 / np.abs(step).max(initial=1e-300))
        point = point + step
        if np.abs(step).max() < STILL:
            break
    else:
        return None
    return None if np.abs(point).max() > STEEPEST else Regression(point, np.linalg.inv(information), p)


class Intercept(NamedTuple):
    """Maximum-likelihood estimates of b and 1/T, where the log odds of class 1 are (g_1 - g_0) / T + b."""

    value: float  # b
    error: float  # Its standard error
    inverse: float  # 1/T


def intercept(logits: NDArray[Any], labels: Labels) -> Intercept | None:
    """Estimate how far the log odds of the labels exceed those that the logits (N, 2) expect.

    Samples drawn by class, w times as many of class 1 for each of class 0 as there are, shift the log odds of
    a calibrated model by log w (Saerens et al. 2002). None where the rows are alike, or separate the classes.
    """
    scores, truth = _some(logits, labels)
    odds = scores[:, 1] - scores[:, 0]
    scale = float(odds.std())
    if scale <= ALIKE * np.abs(odds).max():
        return None
    ones = np.ones(len(odds))
    found = logistic(np.column_stack([ones, odds / scale]), 0.0 * ones, truth.astype(np.float64), ones)
    if found is None:
        return None
    value, slope = found.coefficients.tolist()
    return Intercept(value, math.sqrt(found.covariance[0, 0]), slope / scale)


def shared_residuals(logits: NDArray[Any], labels: Labels, units: Labels | None) -> tuple[float, float]:
    """Measure how much more a row shares of its residual with the nearest row than with others near by.

    With r_i the label of row i, one-hot, less its probabilities at the best temperature, the statistic is the
    sum of r_i r_j over the nearest rows j, less its mean over rows a little farther, in shares of the sum of
    r_i r_i: 1 where each row has a copy with its label, and near 0 where labels are independent given the
    logits, also of a model that is wrong in some places. Rows of one unit (N,) are not compared.

    Returns the statistic and its significance in standard errors.
    """
    from scipy.optimize import minimize_scalar  # noqa: PLC0415 - only fits need scipy

    count, num_classes = logits.shape
    asked = min(MOST_ASKED, MOST_DISTANCES // count, MOST_SHARES // num_classes)
    if count < 2 * FARTHER.stop:
        return 0.0, 0.0
    rng = np.random.default_rng(0)
    rows = np.sort(rng.choice(count, min(count, max(asked, FEWEST_ASKED)), replace=False))
    near = _nearest(_coordinates(logits, rng), rows, units)

    def centred(chosen: NDArray[np.int64]) -> Floats:
        part = logits[chosen].astype(np.float64)
        return np.asarray(part - row_max(part))

    scores, truth = centred(rows), labels[rows][:, None]
    spread = float(-scores.mean()) or 1.0

    def loss(log_inverse: float) -> float:
        logs = log_softmax(math.exp(log_inverse) / spread * scores)
        return -float(np.take_along_axis(logs, truth, 1).mean())

    inverse = math.exp(minimize_scalar(loss, bounds=(-5.0, 5.0), method="bounded").x) / spread

    def residuals(chosen: NDArray[np.int64]) -> Floats:
        found: Floats = -softmax(inverse * centred(chosen))
        found[np.arange(len(chosen)), labels[chosen]] += 1.0
        return found

    own = residuals(rows)
    first, *others = ((own * residuals(near[:, rank])).sum(axis=1) for rank in (0, *FARTHER))
    excess = first - np.mean(others, axis=0)
    error = float(excess.std()) / math.sqrt(len(rows))
    return float(excess.sum() / (own**2).sum()), float(excess.mean()) / error if error else 0.0


def _coordinates(logits: NDArray[Any], rng: np.random.Generator) -> NDArray[np.float32]:
    """Give the logits less the mean of their row, in a few directions, (N, at most `DIRECTIONS`)."""
    count, num_classes = logits.shape
    size = min(num_classes, DIRECTIONS)
    directions = np.linalg.qr(rng.normal(size=(num_classes, size)))[0] if size < num_classes else np.eye(size)
    found = np.empty((count, size))

    def work(rows: slice) -> None:
        part = logits[rows].astype(np.float64)
        found[rows] = (part - part.mean(axis=1, keepdims=True)) @ directions

    for _ in over_blocks(work, count, block_rows(num_classes)):
        pass
    found /= float(np.median(np.abs(found))) or 1.0
    return np.clip(found, -FAR_AWAY, FAR_AWAY).astype(np.float32)


def _nearest(places: NDArray[np.float32], rows: Labels, units: Labels | None) -> Labels:
    """List the nearest other rows of some rows, nearest first, (len(rows), `FARTHER.stop`)."""
    asked, wanted = places[rows], FARTHER.stop
    best = np.empty((len(rows), 0), np.float32)
    found = np.empty((len(rows), 0), np.int64)
    for start in range(0, len(places), SIDE):
        part = places[start : start + SIDE]
        distances = (asked**2).sum(axis=1)[:, None] + (part**2).sum(axis=1) - 2.0 * asked @ part.T
        numbers = np.arange(start, start + len(part))
        own = units[rows][:, None] == units[numbers] if units is not None else rows[:, None] == numbers
        distances[own] = np.inf
        best = np.concatenate([best, distances], axis=1)
        found = np.concatenate([found, np.broadcast_to(numbers, distances.shape)], axis=1)
        if best.shape[1] > wanted:
            kept = np.argpartition(best, wanted, axis=1)[:, :wanted]
            best, found = np.take_along_axis(best, kept, 1), np.take_along_axis(found, kept, 1)
    return np.take_along_axis(found, np.argsort(best, axis=1), 1)


def class_offsets(logits: NDArray[Any], labels: Labels) -> Floats | None:
    """Estimate how far samples were drawn by class, as offsets b (K,) of the logits; 0 of absent classes.

    The maximum of the likelihood of softmax(g / T + b), jointly with T, and of a wide normal prior of b.
    Samples in which class k is exp(b_k) times as frequent, beside the others, as the logits expect have these
    offsets (Saerens et al. 2002). None where 1/T is not between `FLATTEST` and `SHARPEST`.
    """
    from scipy.optimize import minimize  # noqa: PLC0415 - only fits need scipy

    counts = np.bincount(labels, minlength=logits.shape[1])
    present, truth = np.unique(labels, return_inverse=True)
    count, drawn = len(labels), counts[present]

    def centred(rows: slice) -> Floats:
        scores = logits[rows].astype(np.float64)
        scores = scores if len(present) == len(counts) else scores[:, present]
        return np.asarray(scores - row_max(scores))

    def over(work: Callable[[slice], Any]) -> list[Any]:
        return list(over_blocks(work, count, block_rows(len(counts))))

    own = sum(over(lambda rows: float(np.take_along_axis(centred(rows), truth[rows, None], 1).sum())))
    scale = float(np.sqrt(sum(over(lambda rows: float((centred(rows) ** 2).sum()))) / (count * len(present))))
    if scale == 0.0:
        return None

    def loss(point: Floats) -> tuple[float, Floats]:
        slope, offsets = point[0] / scale, point[1:]

        def part(rows: slice) -> tuple[float, float, Floats]:
            scores = centred(rows)
            shares = slope * scores + offsets
            largest = row_max(shares)
            np.exp(shares - largest, out=shares)
            totals = row_sum(shares)
            shares /= totals
            return float((largest + np.log(totals)).sum()), float(np.vdot(shares, scores)), shares.sum(axis=0)

        parts = over(part)
        prior = offsets / OFFSET_SPREAD**2
        value = sum(one[0] for one in parts) - slope * own + float((prior / 2 - drawn) @ offsets)
        by_slope = (sum(one[1] for one in parts) - own) / scale
        by_offsets = np.sum([one[2] for one in parts], axis=0) - drawn + prior
        return value / count, np.append(by_slope, by_offsets) / count

    start = np.append(scale, np.zeros(len(present)))
    found = minimize(
        loss,
        start,
        jac=True,
        method="L-BFGS-B",
        options={"ftol": 1e-12, "gtol": 1e-6, "maxiter": MOST_DESCENTS},
    )
    offsets = np.zeros(len(counts))
    offsets[present] = found.x[1:]
    return offsets if FLATTEST <= found.x[0] / scale <= SHARPEST else None
