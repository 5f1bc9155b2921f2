"""Top-label calibration errors as norms of averaged residuals: ECE, smECE, KS error and debiased error.

Each class takes the outcomes of N samples, has a `value`, and provides the data for intervals and tests: the
change of the averages under resampling, and the values for other residuals at the same confidences.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.evaluation.bins import NUM_BINS, Binning, bin_edges, bin_indices
from boxcal.calibrators.evaluation.outcomes import Outcomes, Vector
from boxcal.calibrators.evaluation.smooth import SmoothedResiduals, smooth_fixed_point

Matrix = NDArray[np.float64]
Pair = tuple[Vector, Vector]

_MOST_POINTS = 1000


class Resampled(Protocol):
    """A metric with its value, and its deviation from the truth under resampling."""

    name: str
    value: float
    statistic: float
    centre: float

    def noise(self, surplus: Matrix) -> Matrix:
        """Return the change of the averages if sample i has the weight 1 + surplus[i]: (cells, R)."""
        ...

    def deviations(self, noise: Matrix) -> Pair:
        """Return the deviations of `centre` above and below the truth, one number per draw of noise."""
        ...


class Drawn(Protocol):
    """A metric that can be computed for other outcomes at the same confidences."""

    name: str

    def errors(self, residuals: Matrix) -> Vector:
        """Return the value (R,) of each column of residuals (N, R)."""
        ...


class TopLabelError(Resampled, Drawn, Protocol):
    """A calibration error of the predicted label's probability."""


class _Groups:
    """Samples sorted into groups, and the sums of any residuals over each group that is not empty."""

    def __init__(self, index: NDArray[np.int64]) -> None:
        self._order = np.argsort(index, kind="stable")
        self._starts = np.flatnonzero(np.diff(index[self._order], prepend=-1))
        self.counts = np.diff(np.append(self._starts, len(index)))

    def sums(self, values: Matrix) -> Matrix:
        """Sum values (N, R) over each group: (groups, R)."""
        result: Matrix = np.add.reduceat(values[self._order], self._starts, axis=0)
        return result


def clear_of_noise(averages: Matrix, noise: Matrix, count: int) -> Matrix:
    """Return the averages (cells, 1) that exceed their noise (cells, draws), and 0 for the others.

    The threshold is 3 standard errors, and grows slowly with the number of samples.
    """
    threshold = max(3.0, math.sqrt(math.log(count)))
    return np.where(np.abs(averages) > threshold * noise.std(axis=1, keepdims=True), averages, 0.0)


def absolute_deviations(averages: Matrix, noise: Matrix, count: int) -> Pair:
    """Bound the deviation of a sum of absolute averages above and below the truth, one number per draw."""
    kept = clear_of_noise(averages, noise, count)
    above = np.abs(kept + noise).sum(axis=0) - np.abs(kept).sum()
    below = (np.sign(averages) * noise).sum(axis=0)
    return above, below


class BinnedError:
    """Top-label ECE over 15 bins; the bins do not change under resampling."""

    def __init__(self, scored: Outcomes, binning: Binning, bins: int = NUM_BINS) -> None:
        self.name = f"ece_{binning}"
        self._groups = _Groups(bin_indices(scored.confidence, bin_edges(scored.confidence, binning, bins)))
        self._residual = scored.residual[:, None]
        self.value = self.statistic = self.centre = float(self.errors(self._residual)[0])

    def _project(self, residuals: Matrix) -> Matrix:
        return self._groups.sums(residuals) / len(residuals)

    def noise(self, surplus: Matrix) -> Matrix:
        """Return the change of the averages if sample i has the weight 1 + surplus[i]: (cells, R)."""
        return self._project(surplus * self._residual)

    def errors(self, residuals: Matrix) -> Vector:
        """Return the ECE (R,) of each column of residuals (N, R)."""
        result: Vector = np.abs(self._project(residuals)).sum(axis=0)
        return result

    def deviations(self, noise: Matrix) -> Pair:
        """Return the deviations of the value above and below the truth, one number per draw."""
        return absolute_deviations(self._project(self._residual), noise, len(self._residual))


class SmoothError:
    """smECE as a norm at its own bandwidth, which bounds its deviations at any other bandwidth.

    The smooth calibration error decreases with the bandwidth h, and smECE is where it equals h. If the true
    smECE is below the estimate it is at least the true error at the estimate's bandwidth, and the other way
    round: so deviations at that one bandwidth bound those of smECE itself.
    """

    name = "smooth_ece"

    def __init__(self, scored: Outcomes) -> None:
        self._confidence = scored.confidence
        self._residual = scored.residual[:, None]
        self.value, self._bandwidth = smooth_fixed_point(scored.confidence, scored.correct)
        self.statistic = self.centre = self.value
        self._points = min(max(round(10 / self._bandwidth), 200), _MOST_POINTS)

    def _project(self, residuals: Matrix) -> Matrix:
        return SmoothedResiduals(self._confidence, residuals).at(self._bandwidth, slice(None), self._points)

    def noise(self, surplus: Matrix) -> Matrix:
        """Return the change of the residuals if sample i has the weight 1 + surplus[i]: (points, R)."""
        return self._project(surplus * self._residual)

    def errors(self, residuals: Matrix) -> Vector:
        """Return the smECE (R,) of each column of residuals (N, R), each at its own bandwidth."""
        return SmoothedResiduals(self._confidence, residuals).fixed_points()[0]

    def deviations(self, noise: Matrix) -> Pair:
        """Return the deviations of the value above and below the truth, one number per draw."""
        return absolute_deviations(self._project(self._residual), noise, len(self._residual))


class KolmogorovSmirnovError:
    """Largest absolute mean residual over the samples up to some confidence (Gupta et al. 2021), bin-free."""

    name = "ks"

    def __init__(self, scored: Outcomes) -> None:
        self._levels = _Groups(np.unique(scored.confidence, return_inverse=True)[1].astype(np.int64))
        coarse = bin_edges(scored.confidence, "mass", _MOST_POINTS)
        self._coarse = _Groups(bin_indices(scored.confidence, coarse))
        self._residual = scored.residual[:, None]
        self.value = self.statistic = self.centre = float(self.errors(self._residual)[0])

    def noise(self, surplus: Matrix) -> Matrix:
        """Return the change of the cumulative means at up to 1,000 confidences: (cells, R)."""
        moved: Matrix = self._coarse.sums(surplus * self._residual).cumsum(axis=0) / len(surplus)
        return moved

    def errors(self, residuals: Matrix) -> Vector:
        """Return the KS error (R,) of each column of residuals (N, R)."""
        result: Vector = np.abs(self._levels.sums(residuals).cumsum(axis=0)).max(axis=0) / len(residuals)
        return result

    def deviations(self, noise: Matrix) -> Pair:
        """Return the deviations of the value above and below the truth, one number per draw."""
        averages = self._coarse.sums(self._residual).cumsum(axis=0)[:, 0]
        peak = int(np.abs(averages).argmax())
        return np.abs(noise).max(axis=0), np.sign(averages[peak]) * noise[peak]


class DebiasedError:
    """Root of the debiased squared calibration error over 15 bins of equal mass.

    Each bin's squared gap is reduced by the variance of its accuracy, which makes the square unbiased
    (Bröcker 2012; Ferro and Fricker 2012; Kumar, Liang and Ma 2019); 0 where that leaves a negative square.
    `statistic` is the root with the square's sign, `centre` the root before debiasing.
    """

    name = "debiased_ece"

    def __init__(self, scored: Outcomes) -> None:
        index = bin_indices(scored.confidence, bin_edges(scored.confidence, "mass"))
        self._groups = _Groups(index)
        self._weight = 1 / np.sqrt(self._groups.counts / len(scored))[:, None]
        self._mean = self._groups.sums(scored.confidence[:, None]) / self._groups.counts[:, None]
        self._residual = scored.residual[:, None]
        self.statistic = float(self.errors(self._residual)[0])
        self.value = max(0.0, self.statistic)
        self.centre = float(np.linalg.norm(self._project(self._residual)))

    def _project(self, residuals: Matrix) -> Matrix:
        scaled: Matrix = self._weight * self._groups.sums(residuals) / len(residuals)
        return scaled

    def noise(self, surplus: Matrix) -> Matrix:
        """Return the change of the weighted gaps if sample i has the weight 1 + surplus[i]: (cells, R)."""
        return self._project(surplus * self._residual)

    def errors(self, residuals: Matrix) -> Vector:
        """Return the signed debiased root (R,) of each column of residuals (N, R)."""
        counts = self._groups.counts[:, None]
        gap = self._groups.sums(residuals) / counts
        accuracy = np.clip(self._mean - gap, 0.0, 1.0)
        variance = accuracy * (1 - accuracy) / np.maximum(counts - 1, 1)
        square = (counts / counts.sum() * (gap**2 - variance)).sum(axis=0)
        signed: Vector = np.sign(square) * np.sqrt(np.abs(square))
        return signed

    def deviations(self, noise: Matrix) -> Pair:
        """Return the deviations of `centre` above and below the truth, one number per draw."""
        averages = self._project(self._residual)
        direction = averages / max(float(np.linalg.norm(averages)), 1e-300)
        return np.linalg.norm(noise, axis=0), (direction * noise).sum(axis=0)
