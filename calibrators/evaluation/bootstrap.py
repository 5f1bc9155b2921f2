"""95 % intervals, from the bootstrap, for metrics and for paired differences.

Error rates get score-type intervals; means (NLL, Brier) the studentised bootstrap. Calibration errors are
norms of a vector of bin or kernel averages, and the percentile bootstrap fails on those: a norm is biased
upward, the bootstrap doubles the bias, and the interval of a calibrated model never reaches 0. Here the
bootstrap only gives the noise Z of the averages d. The bounds follow from the triangle inequality:

    s·Z <= |d + Z| - |d| <= |t + Z| - |t|,   s = sign(d), t = d where it exceeds the noise, else 0

The left side bounds how far an estimate can fall below the truth, the right side how far it can exceed it.
The interval is therefore conservative, most of all on the lower side of a model that is nearly calibrated.
How much of its error such a model owes to noise cannot be told: differences of ECE and smECE of 500 samples,
with the averages shrunk by three rules, had intervals as wide as the normal one that covered .18 to .98.
It reaches down to 0 whenever labels drawn from the model's own probabilities would often (in over 2.5 % of
draws) give an error as large: interval and test agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.evaluation.outcomes import Indices, Tell, Vector, effective_count, silent
from boxcal.calibrators.evaluation.toplabel import Resampled, TopLabelError
from boxcal.calibrators.threads import in_order

LEVEL = 0.95
DRAWS, MANY_SAMPLES, DRAWS_OF_MANY = 1000, 200_000, 400
"""Resamples; fewer of more than many samples, whose intervals are narrow, and take minutes otherwise. They
are then drawn in so many random groups: the sums of groups vary as those of samples do."""
LEAST_SPREAD = 0.1
"""Of the sample's: a resample with less has none of the few values that differ, and shows no spread."""
ALIKE = 1e-12
"""Difference of the sizes of units, of mean 1, up to which they are equal."""
NORMAL = NormalDist().inv_cdf((1 + LEVEL) / 2)
_CELLS_AT_ONCE = 2_000_000  # entries of a block of resampling weights: 16 MB
_KEPT = 200_000_000  # entries of the resamples that are kept: 200 MB; more are drawn anew each time

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        """Return the three numbers by name, JSON-ready: what is not finite becomes None."""
        numbers = {"value": self.value, "low": self.low, "high": self.high}
        return {name: float(v) if math.isfinite(v) else None for name, v in numbers.items()}


class Resamples:
    """How often each of `count` samples occurs in each of so many resamples, the same whenever it is read.

    With groups (count,), whole groups are drawn.
    """

    def __init__(
        self, count: int, *, draws: int | None = None, seed: int = 0, groups: Indices | None = None
    ) -> None:
        if groups is None and count > MANY_SAMPLES:  # at random, as a file may be in the order of its labels
            groups = np.random.default_rng([seed, 4]).permutation(count) % MANY_SAMPLES
        self.count, self.seed, self.groups = count, seed, groups
        self.draws = draws or (DRAWS if count <= MANY_SAMPLES else DRAWS_OF_MANY)
        self._sizes = np.ones(count, np.int64) if groups is None else np.bincount(groups)
        self.units = len(self._sizes)
        """How many are drawn: samples, or groups."""
        self._kept: NDArray[np.uint8] | None = None

    def blocks(self) -> Iterator[Matrix]:
        """Yield blocks (count, R) of the resamples; `draws` columns in all."""
        size = max(1, _CELLS_AT_ONCE // self.count)
        for times in self.of_units(size):
            weights = np.ascontiguousarray(times.T, dtype=np.float64)
            if self.groups is not None:
                weights *= self.count / (self._sizes @ weights)
                weights = weights.take(self.groups, axis=0)
            yield weights

    def of_units(self, size: int | None = None) -> Iterator[NDArray[Any]]:
        """Yield blocks (R, units) of how often each unit is drawn; `draws` rows in all."""
        step = size or max(1, _CELLS_AT_ONCE // self.units)
        if self._kept is None and self.draws * self.units <= _KEPT:
            self._kept = np.concatenate(list(self._drawn(self.draws)))
        if self._kept is None:
            yield from self._drawn(step)
            return
        for start in range(0, self.draws, step):
            yield self._kept[start : start + step]

    def _drawn(self, step: int) -> Iterator[NDArray[Any]]:
        rng = np.random.default_rng(self.seed)
        for start in range(0, self.draws, step):
            times = np.empty((min(step, self.draws - start), self.units), dtype=np.uint8)
            for row in times:
                row[:] = np.bincount(rng.integers(0, self.units, self.units), minlength=self.units)
            yield times


def quantile(draws: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """Quantile along the last axis such that a new draw lies below it in just that share of cases.

    The usual one lies too far inside: with 400 draws it takes half a percent off the coverage of 95 %.
    """
    result: NDArray[np.float64] = np.quantile(draws, share, axis=-1, method="weibull")
    return result


def mean_estimates(
    columns: Matrix,
    resamples: Resamples,
    *,
    level: float | Sequence[float] = LEVEL,
    weights: Vector | None = None,
) -> list[Estimate]:
    """Return the mean of each column with its studentised bootstrap interval.

    `columns`: float64 (N, q), per-sample values, or per-sample differences between two classifiers, for which
    the interval is that of the paired comparison. A column with infinite values has an infinite mean and no
    interval. `weights`: how much each sample counts (N,), of mean 1; a resampled sample keeps its weight.
    """
    finite = np.atleast_1d(np.isfinite(columns).all(axis=0))
    values = np.where(finite, columns, 0.0)
    count = len(values)
    mean = (values if weights is None else values * weights[:, None]).mean(axis=0)
    # A resampled mean is a ratio of two sums, of `centred` and of `sizes`, both of mean 1 over the units.
    centred = values - mean
    sizes = np.ones(count) if weights is None else weights
    if weights is not None:
        centred *= weights[:, None]
    if resamples.groups is not None:
        sums = np.zeros((resamples.units, centred.shape[1] + 1))
        np.add.at(sums, resamples.groups, np.column_stack([centred, sizes]))
        sums *= len(sums) / count
        centred, sizes, count = sums[:, :-1], sums[:, -1], len(sums)
    spread = np.sqrt((centred**2).mean(axis=0))
    sides = [centred, centred**2]
    if np.ptp(sizes) > ALIKE:
        sides += [centred * sizes[:, None], sizes[:, None], sizes[:, None] ** 2]
    parts = np.hstack(sides)
    moments = np.concatenate(
        [(times.astype(np.float64) @ parts).T / count for times in resamples.of_units()], axis=1
    )
    shift, second, *others = np.split(moments, np.cumsum([side.shape[1] for side in sides[:-1]]))
    if others:
        cross, total, squares = others
        shift /= total
        second = (second - 2.0 * shift * cross + shift**2 * squares) / total**2
    else:
        second -= shift**2
    resampled = np.sqrt(np.maximum(second, 0.0))
    scale = np.where(resampled > LEAST_SPREAD * spread[:, None], resampled, spread[:, None])
    studentised = np.divide(shift, scale, out=np.zeros_like(shift), where=scale > 0)
    results = []
    for i, one in enumerate(np.broadcast_to(level, columns.shape[1])):
        tail = (1 - float(one)) / 2
        below, above = float(quantile(studentised[i], tail)), float(quantile(studentised[i], 1 - tail))
        value = float((columns[:, i] if weights is None else columns[:, i] * weights).mean())
        low, high = value - above * float(spread[i]), value - below * float(spread[i])
        results.append(Estimate(value, low, high) if finite[i] else Estimate(value, math.nan, math.nan))
    return results


def proportion_estimate(
    hits: Vector, weights: Vector | None = None, groups: Indices | None = None
) -> Estimate:
    """Return a proportion with its 95 % score interval (Wilson 1927), which holds near 0 and 1 too.

    With weights or groups (N,), the interval is that of the effective number of samples.
    """
    share = float(np.average(hits, weights=weights))
    count = max(1, round(effective_count(hits, weights, groups)))
    found = round(share * count)
    squared = NORMAL**2
    centre = (found + squared / 2) / (count + squared)
    half = NORMAL * math.sqrt(found * (count - found) / count + squared / 4) / (count + squared)
    low = centre - half if found else 0.0
    high = centre + half if found < count else 1.0
    return Estimate(share, min(share, low), max(share, high))


def proportion_difference(
    after: Vector, before: Vector, weights: Vector | None = None, groups: Indices | None = None
) -> Estimate:
    """Return a paired difference of proportions with its 95 % interval (Bonett and Price 2012).

    One imagined sample is added to each kind of disagreement, so that the interval keeps its level when the
    two disagree rarely or never. Weights and groups (N,) as for a proportion.
    """
    difference = after - before
    gained, lost = (float(np.average(sign * difference > 0, weights=weights)) for sign in (1, -1))
    count = effective_count(difference, weights, groups)
    up, down = (gained * count + 1) / (count + 2), (lost * count + 1) / (count + 2)
    half = NORMAL * math.sqrt((up + down - (up - down) ** 2) / (count + 2))
    value = gained - lost
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
    top_label: Sequence[TopLabelError],
    whole: Sequence[Resampled],
    resamples: Resamples,
    tell: Tell = silent,
) -> dict[str, Deviations]:
    """Return the deviations of several metrics of the same samples, by name.

    The deviations of two calls with the same resamples are paired.
    """
    metrics = [*top_label, *whole]

    def work(weights: Matrix) -> list[Matrix]:
        surplus = weights - 1.0
        moved = surplus * top_label[0].residual
        return [one.noise(moved) for one in top_label] + [one.noise(surplus) for one in whole]

    noise = []
    for parts in in_order(work, resamples.blocks()):
        noise.append(parts)
        tell(sum(parts[0].shape[1] for parts in noise) / resamples.draws)
    result = {}
    for place, metric in enumerate(metrics):
        above, below = metric.deviations(np.concatenate([parts[place] for parts in noise], axis=1))
        result[metric.name] = Deviations(metric.value, metric.centre, above, below)
    return result
