"""Intervals that keep their promise: 95 % bootstrap intervals for metrics and for paired differences.

Error rates get score-type intervals; means (NLL, Brier) the studentised bootstrap. Calibration errors are
norms of a vector of bin or kernel averages, and the percentile bootstrap fails on those: a norm is biased
upward, the bootstrap doubles the bias, and the interval of a calibrated model never reaches 0. Here the
bootstrap only supplies the noise Z of the averages d, and the triangle inequality does the rest:

    s·Z <= |d + Z| - |d| <= |t + Z| - |t|,   s = sign(d), t = d where it stands out from the noise, else 0

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
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from calibrators.evaluation.bins import NUM_BINS, Binning, bin_edges, bin_indices
from calibrators.evaluation.outcomes import Outcomes, Vector
from calibrators.evaluation.smooth import SmoothedResiduals, smooth_fixed_point

LEVEL = 0.95
DRAWS = 1000
_Z = NormalDist().inv_cdf((1 + LEVEL) / 2)
_CELLS_AT_ONCE = 2_000_000  # entries of a block of resampling weights: 16 MB
_MOST_POINTS = 1000

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


class ErrorNorm(Protocol):
    """A calibration error: the sum of absolute values of a linear map of the residuals."""

    name: str
    value: float
    residual: Vector

    def project(self, residuals: Matrix) -> Matrix:
        """Map residuals (N, R), one column per resample, to averages (cells, R)."""
        ...

    def errors(self, residuals: Matrix) -> Vector:
        """Error (R,) that each column of residuals would give."""
        ...


class BinnedError:
    """Top-label ECE over 15 bins of one sample, as a norm; the bins stay as they are when resampling."""

    def __init__(self, scored: Outcomes, binning: Binning) -> None:
        self.name = f"ece_{binning}"
        index = bin_indices(scored.confidence, bin_edges(scored.confidence, binning, NUM_BINS))
        self._order = np.argsort(index, kind="stable")
        self._starts = np.flatnonzero(np.diff(index[self._order], prepend=-1))
        self.residual = scored.residual
        self.value = float(np.abs(self.project(self.residual[:, None])).sum())

    def project(self, residuals: Matrix) -> Matrix:
        """Sum over each bin that holds samples, and divide by N."""
        return np.add.reduceat(residuals[self._order], self._starts, axis=0) / len(residuals)

    def errors(self, residuals: Matrix) -> Vector:
        """ECE (R,) that each column of residuals would give."""
        return np.abs(self.project(residuals)).sum(axis=0)


class SmoothError:
    """smECE as a norm: at the bandwidth it was found at, which bounds its deviations at any other.

    Smooth calibration error falls as the bandwidth h grows, and smECE is where it equals h. If the true
    smECE is below the estimate it is at least the true error at the estimate's bandwidth, and the other way
    round: so deviations at that one bandwidth bound those of smECE itself.
    """

    name = "smooth_ece"

    def __init__(self, scored: Outcomes) -> None:
        self._confidence = scored.confidence
        self.residual = scored.residual
        self.value, self._bandwidth = smooth_fixed_point(scored.confidence, scored.correct)
        self._points = min(max(round(10 / self._bandwidth), 200), _MOST_POINTS)

    def project(self, residuals: Matrix) -> Matrix:
        """Smoothed residuals over an even mesh of [0, 1]."""
        return SmoothedResiduals(self._confidence, residuals).at(self._bandwidth, slice(None), self._points)

    def errors(self, residuals: Matrix) -> Vector:
        """Give smECE (R,) of each column of residuals, each at its own bandwidth."""
        return SmoothedResiduals(self._confidence, residuals).fixed_points()[0]


def resamples(count: int, draws: int, seed: int) -> Iterator[Matrix]:
    """Yield blocks (count, R) of how often each sample occurs in a resample; `draws` columns in all."""
    rng = np.random.default_rng(seed)
    left = draws
    while left:
        block = min(left, max(1, _CELLS_AT_ONCE // count))
        weights = np.empty((count, block))
        for column in range(block):
            weights[:, column] = np.bincount(rng.integers(0, count, count), minlength=count)
        yield weights
        left -= block


def mean_estimates(columns: Matrix, *, draws: int = DRAWS, seed: int = 0) -> list[Estimate]:
    """Return the mean of each column with its 95 % studentised bootstrap interval.

    Parameters
    ----------
    columns : float64 (N, q)
        Per-sample values, or per-sample differences between two classifiers, for which the interval is that
        of the paired comparison. A column with infinite values has an infinite mean and no interval.
    draws, seed
        Number of resamples, and what makes them reproducible.
    """
    finite = np.isfinite(columns).all(axis=0)
    values = np.where(finite, columns, 0.0)
    count = len(values)
    mean = values.mean(axis=0)
    centred = values - mean
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
    tail = (1 - LEVEL) / 2
    below, above = np.quantile(studentised, [tail, 1 - tail], axis=1)
    results = []
    for i in range(columns.shape[1]):
        if finite[i]:
            results.append(Estimate(mean[i], mean[i] - above[i] * spread[i], mean[i] - below[i] * spread[i]))
        else:
            results.append(Estimate(float(columns[:, i].mean()), math.nan, math.nan))
    return results


def proportion_estimate(hits: Vector) -> Estimate:
    """Return a proportion with its 95 % score interval (Wilson 1927), which holds near 0 and 1 too."""
    count, share = len(hits), float(hits.mean())
    centre = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2)) / (1 + _Z**2 / count)
    return Estimate(share, max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half)))


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
    """How far an error norm's estimate can lie above and below the truth, one number per resample.

    `perfect` holds the errors that labels drawn from the model's own probabilities give.
    """

    value: float
    above: Vector
    below: Vector
    perfect: Vector

    def estimate(self) -> Estimate:
        """Return the estimate with its 95 % interval."""
        tail = (1 - LEVEL) / 2
        low = self.value - float(np.quantile(self.above, 1 - tail))
        high = self.value - float(np.quantile(self.below, tail))
        if self.value <= np.quantile(self.perfect, 1 - tail):
            low = 0.0
        return Estimate(self.value, min(max(0.0, low), self.value), min(1.0, max(high, self.value)))

    @property
    def p_value(self) -> float:
        """Chance of an error at least this large if the model were perfectly calibrated (exact test)."""
        return float((1 + (self.perfect >= self.value).sum()) / (1 + len(self.perfect)))

    def minus(self, other: Deviations) -> Estimate:
        """Return the paired difference self - other with its 95 % interval; both from the same resamples."""
        tail = (1 - LEVEL) / 2
        value = self.value - other.value
        low = value - float(np.quantile(self.above - other.below, 1 - tail))
        high = value - float(np.quantile(self.below - other.above, tail))
        return Estimate(value, min(value, low), max(value, high))


def norm_deviations(
    norms: Sequence[ErrorNorm], confidence: Vector, *, draws: int = DRAWS, seed: int = 0
) -> list[Deviations]:
    """Return the deviations of several calibration errors of the same N confidences.

    Two sequences with the same N, `draws` and `seed` share their resamples, so that their deviations are
    paired.
    """
    count = len(confidence)
    noise: list[list[Matrix]] = [[] for _ in norms]
    perfect: list[list[Vector]] = [[] for _ in norms]
    label_rng = np.random.default_rng([seed, 1])
    for weights in resamples(count, draws, seed):
        surplus = weights - 1.0
        drawn = confidence[:, None] - (label_rng.random(weights.shape) < confidence[:, None])
        for norm, noise_parts, perfect_parts in zip(norms, noise, perfect, strict=True):
            noise_parts.append(norm.project(surplus * norm.residual[:, None]))
            perfect_parts.append(norm.errors(drawn))
    results = []
    for norm, noise_parts, perfect_parts in zip(norms, noise, perfect, strict=True):
        shaken = np.concatenate(noise_parts, axis=1)
        averages = norm.project(norm.residual[:, None])
        clear = np.abs(averages) > _threshold(count) * shaken.std(axis=1, keepdims=True)
        kept = np.where(clear, averages, 0.0)
        above = np.abs(kept + shaken).sum(axis=0) - np.abs(kept).sum()
        below = (np.sign(averages) * shaken).sum(axis=0)
        results.append(Deviations(norm.value, above, below, np.concatenate(perfect_parts)))
    return results


def _threshold(count: int) -> float:
    """How many standard errors an average must be from 0 to stand out: grows slowly with N, never below 3."""
    return max(3.0, math.sqrt(math.log(count)))
