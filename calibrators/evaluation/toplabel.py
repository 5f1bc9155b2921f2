"""Top-label calibration errors as norms of averaged residuals: ECE, smECE, KS, the debiased error and MCE.

Each takes the condensed outcomes of N samples and has its `value`, and what intervals and tests need:
how the averages move when samples are resampled, and which values other residuals at the same confidences
would give.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.evaluation.bins import NUM_BINS, Binning, bin_edges, bin_indices
from boxcal.calibrators.evaluation.outcomes import Outcomes, Vector, effective_count
from boxcal.calibrators.evaluation.smooth import Confidences, SmoothedResiduals

Matrix = NDArray[np.float64]
Pair = tuple[Vector, Vector]

_MOST_POINTS = 1000


class Resampled(Protocol):
    """A metric whose distance from the truth resampling shows; `statistic` is what a p-value compares.

    `perfect_scale`: by how much groups of samples raise what perfect calibration shows.
    """

    name: str
    value: float
    statistic: float
    centre: float
    perfect_scale: float

    def noise(self, surplus: Matrix) -> Matrix:
        """Return what moves when sample i counts 1 + surplus[i] times, (cells, R) for surplus (N, R)."""
        ...

    def deviations(self, noise: Matrix) -> Pair:
        """Return how far `centre` may lie above and below the truth, one number per draw of noise."""
        ...


class _Groups:
    """Groups of samples that are not empty, and the sums of any residuals over them."""

    def __init__(self, index: NDArray[np.int64]) -> None:
        _, groups, self.counts = np.unique(index, return_inverse=True, return_counts=True)
        self._groups = groups.astype(np.int64)

    def sums(self, values: Matrix) -> Matrix:
        """Sum values (N, R) over each group: (groups, R)."""
        from boxcal.calibrators.evaluation import loops  # noqa: PLC0415 - numba loads when needed

        result = np.zeros((len(self.counts), values.shape[1]))
        loops.add_by_group(self._groups, values, result)
        return result

    def masses(self, weights: Vector | None) -> Pair:
        """Return the sum of the weights in each group, and the effective number of its samples."""
        if weights is None:
            counts = self.counts.astype(np.float64)
            return counts, counts
        mass, squares = self.sums(np.column_stack([weights, weights**2])).T
        return mass, mass**2 / squares


class TopLabelError:
    """A calibration error of the predicted label's probability: here the sum of absolute averages."""

    name: str
    perfect_scale = 1.0

    def __init__(self, scored: Outcomes) -> None:
        self._scored = scored
        self._residual = scored.weighted(scored.residual[:, None])
        self.value = self.statistic = self.centre = float(self._errors(self._residual)[0])

    def _project(self, residuals: Matrix) -> Matrix:
        """Average residuals (N, R) over cells: (cells, R)."""
        raise NotImplementedError

    def errors(self, residuals: Matrix) -> Vector:
        """Return the value (R,) that each column of residuals (N, R) would give."""
        return self._errors(self._scored.weighted(residuals))

    def _errors(self, residuals: Matrix) -> Vector:
        """Return the same for residuals that the weights have multiplied."""
        result: Vector = np.abs(self._project(residuals)).sum(axis=0)
        return result

    @property
    def residual(self) -> Matrix:
        """The residuals (N, 1) that the averages are of; those of all top-label errors are the same."""
        return self._residual

    def noise(self, moved: Matrix) -> Matrix:
        """Return how the averages move when the residuals move by (N, R): (cells, R)."""
        return self._project(moved)

    def deviations(self, noise: Matrix) -> Pair:
        """Return how far `centre` may lie above and below the truth, one number per draw of noise.

        An average counts as nonzero from 3 standard errors on; the threshold grows slowly with N.
        """
        averages = self._project(self._residual)
        threshold = max(3.0, math.sqrt(math.log(len(self._residual)))) * noise.std(axis=1, keepdims=True)
        kept = np.where(np.abs(averages) > threshold, averages, 0.0)
        above = np.abs(kept + noise).sum(axis=0) - np.abs(kept).sum()
        return above, (np.sign(averages) * noise).sum(axis=0)


class BinnedError(TopLabelError):
    """Top-label ECE over 15 bins; the bins stay as they are when samples are drawn anew."""

    def __init__(self, scored: Outcomes, binning: Binning, bins: int = NUM_BINS) -> None:
        self.name = f"ece_{binning}"
        edges = bin_edges(scored.confidence, binning, bins, scored.weights)
        self._groups = _Groups(bin_indices(scored.confidence, edges))
        super().__init__(scored)

    def _project(self, residuals: Matrix) -> Matrix:
        return self._groups.sums(residuals) / len(residuals)


class SmoothError(TopLabelError):
    """smECE as a norm: at the bandwidth it was found at, which bounds its deviations at any other.

    Smooth calibration error falls as the bandwidth h grows, and smECE is where it equals h. If the true
    smECE is below the estimate it is at least the true error at the estimate's bandwidth, and the other way
    round: so deviations at that one bandwidth bound those of smECE itself.
    """

    name = "smooth_ece"

    def __init__(self, scored: Outcomes) -> None:
        self._scored, self._confidences = scored, Confidences(scored.confidence, scored.weights)
        self._residual = scored.weighted(scored.residual[:, None])
        value, bandwidth = SmoothedResiduals(self._confidences, self._residual).fixed_points()
        self.value, self._bandwidth = float(value[0]), float(bandwidth[0])
        self.statistic = self.centre = self.value
        self._points = min(max(round(10 / self._bandwidth), 200), _MOST_POINTS)

    def _project(self, residuals: Matrix) -> Matrix:
        return SmoothedResiduals(self._confidences, residuals).at(self._bandwidth, points=self._points).T

    def _errors(self, residuals: Matrix) -> Vector:
        """Return the smECE (R,) of each column of residuals (N, R), each at its own bandwidth."""
        return SmoothedResiduals(self._confidences, residuals).fixed_points()[0]


class KolmogorovSmirnovError(TopLabelError):
    """Largest absolute mean residual over the samples up to some confidence (Gupta et al. 2021), bin-free."""

    name = "ks"

    def __init__(self, scored: Outcomes) -> None:
        self._order = np.argsort(scored.confidence, kind="stable")
        self._is_last = np.diff(scored.confidence[self._order], append=np.inf) > 0
        coarse = bin_edges(scored.confidence, "mass", _MOST_POINTS)
        self._coarse = _Groups(bin_indices(scored.confidence, coarse))
        super().__init__(scored)

    def _project(self, residuals: Matrix) -> Matrix:
        """Give the cumulative means at up to 1,000 confidences."""
        moved: Matrix = self._coarse.sums(residuals).cumsum(axis=0) / len(residuals)
        return moved

    def _errors(self, residuals: Matrix) -> Vector:
        """Return the KS error (R,) that each column of residuals (N, R) would give."""
        from boxcal.calibrators.evaluation import loops  # noqa: PLC0415 - numba loads when needed

        largest = np.empty(residuals.shape[1])
        loops.largest_running_sums(self._order, self._is_last, residuals, largest)
        result: Vector = largest / len(residuals)
        return result

    def deviations(self, noise: Matrix) -> Pair:
        """Return how far the value may lie above and below the truth, one number per draw."""
        averages = self._project(self._residual)[:, 0]
        peak = int(np.abs(averages).argmax())
        return np.abs(noise).max(axis=0), np.sign(averages[peak]) * noise[peak]


class DebiasedError(TopLabelError):
    """Root of the debiased squared calibration error over 15 bins of equal mass.

    Each bin's squared gap is reduced by the variance of its accuracy, which makes the square unbiased
    (Bröcker 2012; Ferro and Fricker 2012; Kumar, Liang and Ma 2019); 0 where that leaves a negative square.
    `statistic` is the root with the square's sign, `centre` the root before debiasing.
    """

    name = "debiased_ece"

    def __init__(self, scored: Outcomes) -> None:
        edges = bin_edges(scored.confidence, "mass", weights=scored.weights)
        self._groups = _Groups(bin_indices(scored.confidence, edges))
        self._mass, self._counts = self._groups.masses(scored.weights)
        self._weight = 1 / np.sqrt(self._mass / len(scored))[:, None]
        confidence = scored.weighted(scored.confidence[:, None])
        self._mean = self._groups.sums(confidence) / self._mass[:, None]
        super().__init__(scored)
        self.value = max(0.0, self.statistic)
        self.centre = float(np.linalg.norm(self._project(self._residual)))

    def _project(self, residuals: Matrix) -> Matrix:
        scaled: Matrix = self._weight * self._groups.sums(residuals) / len(residuals)
        return scaled

    def _errors(self, residuals: Matrix) -> Vector:
        """Return the signed debiased root (R,) that each column of residuals (N, R) would give."""
        counts, mass = self._counts[:, None], self._mass[:, None]
        gap = self._groups.sums(residuals) / mass
        accuracy = np.clip(self._mean - gap, 0.0, 1.0)
        variance = accuracy * (1 - accuracy) / np.maximum(counts - 1, 1)
        square = (mass / mass.sum() * (gap**2 - variance)).sum(axis=0)
        signed: Vector = np.sign(square) * np.sqrt(np.abs(square))
        return signed

    def deviations(self, noise: Matrix) -> Pair:
        """Return how far `centre` may lie above and below the truth, one number per draw."""
        averages = self._project(self._residual)
        direction = averages / max(float(np.linalg.norm(averages)), 1e-300)
        return np.linalg.norm(noise, axis=0), (direction * noise).sum(axis=0)


class MaximumError:
    """MCE: the largest gap of the 15 bins of equal width that hold samples.

    No resampling can speak for a bin of three samples, so the interval is built from exact binomial limits
    (Clopper and Pearson 1934) of every bin's accuracy. It is for the same bins and confidences: the gap
    between each bin's mean confidence and the mean chance of being correct of its samples. It is
    conservative, as its lower end allows for all bins at once.
    """

    name = "mce"

    def __init__(self, scored: Outcomes) -> None:
        index = bin_indices(scored.confidence, bin_edges(scored.confidence, "width"))
        self._order = np.argsort(index, kind="stable")
        self._starts = np.flatnonzero(np.diff(index[self._order], prepend=-1))
        self._scored = scored
        self._mass = self._counts = np.diff(np.append(self._starts, len(index)))
        if scored.weights is not None:
            self._mass, squares = self._sums(np.column_stack([scored.weights, scored.weights**2])).T
            self._counts = self._mass**2 / squares
        if scored.groups is not None:
            parts = np.split(self._order, self._starts[1:])
            bins = (scored.rows(part) for part in parts)
            self._counts = np.array([effective_count(one.correct, one.weights, one.groups) for one in bins])
        self._correct, self._confidence = (
            self._sums(scored.weighted(values[:, None]))[:, 0]
            for values in (scored.correct, scored.confidence)
        )
        self._confidence /= self._mass
        self._correct *= self._counts / self._mass
        self.value = self.statistic = float(self.errors(scored.residual[:, None])[0])

    def errors(self, residuals: Matrix) -> Vector:
        """Return the MCE (R,) that each column of residuals (N, R) would give."""
        result: Vector = np.abs(self._sums(self._scored.weighted(residuals)) / self._mass[:, None]).max(
            axis=0
        )
        return result

    def _sums(self, values: Matrix) -> Matrix:
        """Sum values (N, R) over each bin: (bins, R).

        Bins of few samples often give equal sums but for the order of the additions, which is always this.
        """
        result: Matrix = np.add.reduceat(values[self._order], self._starts, axis=0)
        return result

    def limits(self, error: float) -> tuple[float, float]:
        """Return the interval's ends; each fails with probability at most error / 2."""
        low, high = self._accuracy_limits(error / len(self._correct))
        least = np.maximum(np.maximum(self._confidence - high, low - self._confidence), 0.0)
        low, high = self._accuracy_limits(error)
        most = np.maximum(np.abs(self._confidence - high), np.abs(self._confidence - low))
        return min(float(least.max()), self.value), max(float(most.max()), self.value)

    def _accuracy_limits(self, error: float) -> Pair:
        from scipy.special import betaincinv  # noqa: PLC0415 - a service that only predicts needs no scipy

        wrong = self._counts - self._correct
        low = betaincinv(np.maximum(self._correct, 1e-9), wrong + 1, error / 2)
        high = betaincinv(self._correct + 1, np.maximum(wrong, 1e-9), 1 - error / 2)
        return np.where(self._correct > 0, low, 0.0), np.where(wrong > 0, high, 1.0)
