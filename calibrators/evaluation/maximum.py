"""Maximum calibration error (MCE): the largest gap of any bin, with an interval for bins with few samples.

Resampling is invalid for bins with very few samples, so the interval uses exact binomial limits
(Clopper and Pearson 1934) of every bin's accuracy.
"""

from __future__ import annotations

import numpy as np

from boxcal.calibrators.evaluation.bins import bin_edges, bin_indices
from boxcal.calibrators.evaluation.outcomes import Outcomes, Vector
from boxcal.calibrators.evaluation.toplabel import Matrix


class MaximumError:
    """MCE over the 15 bins of equal width that are not empty.

    The interval is for the same bins and confidences: the gap between each bin's mean confidence and the mean
    chance of being correct of its samples. It is conservative: its lower limit holds for all bins
    simultaneously.
    """

    name = "mce"

    def __init__(self, scored: Outcomes) -> None:
        index = bin_indices(scored.confidence, bin_edges(scored.confidence, "width"))
        self._bins, self._index = np.unique(index, return_inverse=True)
        self._counts = np.bincount(self._index).astype(np.float64)
        self._correct = np.bincount(self._index, scored.correct)
        self._confidence = np.bincount(self._index, scored.confidence) / self._counts
        self.value = self.statistic = float(self.errors(scored.residual[:, None])[0])

    def errors(self, residuals: Matrix) -> Vector:
        """Return the MCE (R,) of each column of residuals (N, R)."""
        order = np.argsort(self._index, kind="stable")
        starts = np.searchsorted(self._index[order], np.arange(len(self._bins)))
        gaps = np.add.reduceat(residuals[order], starts, axis=0) / self._counts[:, None]
        result: Vector = np.abs(gaps).max(axis=0)
        return result

    def limits(self, error: float) -> tuple[float, float]:
        """Return the limits of the interval; each fails with probability at most error / 2."""
        low, high = self._accuracy_limits(error / len(self._bins))
        least = np.maximum(np.maximum(self._confidence - high, low - self._confidence), 0.0)
        low, high = self._accuracy_limits(error)
        most = np.maximum(np.abs(self._confidence - high), np.abs(self._confidence - low))
        return min(float(least.max()), self.value), max(float(most.max()), self.value)

    def _accuracy_limits(self, error: float) -> tuple[Vector, Vector]:
        from scipy.special import betaincinv  # noqa: PLC0415 - a service that only predicts needs no scipy

        wrong = self._counts - self._correct
        low = betaincinv(np.maximum(self._correct, 1e-9), wrong + 1, error / 2)
        high = betaincinv(self._correct + 1, np.maximum(wrong, 1e-9), 1 - error / 2)
        return np.where(self._correct > 0, low, 0.0), np.where(wrong > 0, high, 1.0)
