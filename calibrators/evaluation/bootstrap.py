"""95 % intervals, from the bootstrap, for metrics and for paired differences.

Error rates get score-type intervals; means (NLL, Brier) the studentised bootstrap. Calibration errors are
norms of a vector of bin or kernel averages, and the percentile bootstrap fails on those: a norm is biased
upward, the bootstrap doubles the bias, and the interval of a calibrated model never reaches 0. Here the
bootstrap only gives the noise Z of the averages d. The bounds follow from the triangle inequality:

    s·Z <= |d + Z| - |d| <= |t + Z| - |t|,   s = sign(d), t = d where it exceeds the noise, else 0

The left side bounds how far an estimate can fall below the truth, the right side how far it can exceed it.
The interval is therefore conservative, most of all on the lower side of a model that is nearly calibrated.
It reaches down to 0 whenever labels drawn from the model's own probabilities would often (in over 2.5 % of
draws) give an error as large: interval and test agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.evaluation.outcomes import Indices, Vector
from boxcal.calibrators.evaluation.toplabel import Resampled

LEVEL = 0.95
DRAWS = 1000
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
_CELLS_AT_ONCE = 2_000_000  # entries of a block of resampling weights: 16 MB

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def plus(self, shift: float) -> Estimate:
        """Move the value and its interval."""
        return Estimate(self.value + shift, self.low + shift, self.high + shift)

    def to_dict(self) -> dict[str, float | None]:
        """Return the three numbers by name, JSON-ready: what is not finite becomes None."""
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        return {name: float(v) if math.isfinite(v) else None for name, v in numbers.items()}


def resamples(count: int, draws: int, seed: int, groups: Indices | None = None) -> Iterator[Matrix]:
    """Yield blocks (count, R) of how often each sample occurs in a resample; `draws` columns in all.

    With groups (count,), whole groups are drawn.
    """
    if groups is not None:
        for weights in resamples(int(groups.max()) + 1, draws, seed):
            drawn = weights[groups]
            yield drawn * (count / drawn.sum(axis=0))
        return
    rng = np.random.default_rng(seed)
    left = draws
    while left:
        block = min(left, max(1, _CELLS_AT_ONCE // count))
        weights = np.empty((count, block))
        for column in range(block):
            weights[:, column] = np.bincount(rng.integers(0, count, count), minlength=count)
        yield weights
        left -= block


def quantile(draws: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Quantile along the last axis such that a new draw lies below it in just that share of cases.

    The usual one lies too far inside: with 400 draws it takes half a percent off the coverage of 95 %.
    """
    result: NDArray[np.float64] = np.quantile(draws, share, axis=-1, method="weibull")
    return result


def mean_estimates(
    columns: Matrix,
    *,
    together: bool = False,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
    groups: Indices | None = None,
) -> list[Estimate]:
    """Return the mean of each column with its studentised bootstrap interval.

    Parameters
    ----------
    columns : float64 (N, q)
        Per-sample values, or per-sample differences between two classifiers, for which the interval is that
        of the paired comparison. A column with infinite values has an infinite mean and no interval.
    together
        Whether `level` is the chance that all the intervals hold at once, so that one may be picked out after
        a look at the means (the maximal statistic; Romano and Wolf 2005).
    level
        Chance that an interval holds the true mean.
    draws, seed
        Number of resamples, and what makes them reproducible.
    groups
        Numbers (N,) of groups, which are resampled in place of samples: the mean is linear in their sums.
    """
    finite = np.atleast_1d(np.isfinite(columns).all(axis=0))
    values = np.where(finite, columns, 0.0)
    count = len(values)
    mean = values.mean(axis=0)
    centred = values - mean
    if groups is not None:
        sums = np.zeros((int(groups.max()) + 1, centred.shape[1]))
        np.add.at(sums, groups, centred)
        centred, count = sums * (len(sums) / count), len(sums)
    spread = np.sqrt((centred**2).mean(axis=0))
    shifts, spreads = [], []
    for weights in resamples(count, draws, seed):
        first = centred.T @ weights / count
        second = (centred**2).T @ weights / count
        shifts.append(first)
        spreads.append(np.sqrt(np.maximum(second - first**2, 0.0)))
    shift, resampled = np.concatenate(shifts, axis=1), np.concatenate(spreads, axis=1)
    scale = np.where(resampled > 1e-12 * spread[:, None], resampled, spread[:, None])
    studentised = np.divide(shift, scale, out=np.zeros_like(shift), where=scale > 0)
    tail = (1 - level) / 2
    lowest, highest = studentised, studentised
    if together:
        lowest, highest = (
            np.broadcast_to(extreme(studentised, axis=0), studentised.shape) for extreme in (np.min, np.max)
        )
    below, above = quantile(lowest, tail), quantile(highest, 1 - tail)
    results = []
    for i in range(columns.shape[1]):
        value = float(columns[:, i].mean())
        low, high = value - float(above[i] * spread[i]), value - float(below[i] * spread[i])
        results.append(Estimate(value, low, high) if finite[i] else Estimate(value, math.nan, math.nan))
    return results


def proportion_estimate(hits: Vector) -> Estimate:
    """Return a proportion with its 95 % score interval (Wilson 1927), which holds near 0 and 1 too."""
    from scipy.stats import binomtest  # noqa: PLC0415 - a service that only predicts needs no scipy

    share = float(hits.mean())
    low, high = binomtest(int(hits.sum()), len(hits)).proportion_ci(LEVEL, method="wilson")
    return Estimate(share, min(share, float(low)), max(share, float(high)))


def proportion_difference(after: Vector, before: Vector) -> Estimate:
    """Return a paired difference of proportions with its 95 % interval (Bonett and Price 2012).

    One imagined sample is added to each kind of disagreement, so that the interval keeps its level when the
    two disagree rarely or never.
    """
    count = len(after)
    gained, lost = (float((sign * (after - before) > 0).sum()) for sign in (1, -1))
    up, down = (gained + 1) / (count + 2), (lost + 1) / (count + 2)
    half = _Z * math.sqrt((up + down - (up - down) ** 2) / (count + 2))
    value = (gained - lost) / count
    return Estimate(value, max(-1.0, min(value, up - down - half)), min(1.0, max(value, up - down + half)))


@dataclass(frozen=True, eq=False)
class Deviations:
    """How far a metric's estimate can lie above and below the truth, one number per resample.

    The interval is centre - above to centre - below; `value` is what is reported, inside it.
    """

    value: float
    centre: float
    above: Vector
    below: Vector

    def estimate(self, *, reaches_zero: bool) -> Estimate:
        """Return the value with its 95 % interval, from 0 on where perfect calibration is not refuted."""
        tail = (1 - LEVEL) / 2
        low = 0.0 if reaches_zero else self.centre - float(quantile(self.above, 1 - tail))
        high = self.centre - float(quantile(self.below, tail))
        return Estimate(self.value, min(max(0.0, low), self.value), max(high, self.value))

    def minus(self, other: Deviations, level: float = LEVEL) -> Estimate:
        """Return the paired difference self - other with its interval; both from the same resamples."""
        tail = (1 - level) / 2
        value, centre = self.value - other.value, self.centre - other.centre
        low = centre - float(quantile(self.above - other.below, 1 - tail))
        high = centre - float(quantile(self.below - other.above, tail))
        return Estimate(value, min(value, low), max(value, high))


def deviations_of(
    metrics: Sequence[Resampled],
    count: int,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    groups: Indices | None = None,
) -> dict[str, Deviations]:
    """Return the deviations of several metrics of the same N = `count` samples, by name.

    Two calls with the same count, draws, seed and groups share their resamples: their deviations are paired.
    """
    noise: list[list[Matrix]] = [[] for _ in metrics]
    for weights in resamples(count, draws, seed, groups):
        surplus = weights - 1.0
        for metric, parts in zip(metrics, noise, strict=True):
            parts.append(metric.noise(surplus))
    result = {}
    for metric, parts in zip(metrics, noise, strict=True):
        above, below = metric.deviations(np.concatenate(parts, axis=1))
        result[metric.name] = Deviations(metric.value, metric.centre, above, below)
    return result
