"""Calibration of the probability of every class: classwise ECE and the two parts of the Brier score.

Probabilities (N, K) are binned per class into K x 15 cells in one pass over blocks of rows. The intervals
require one more pass for the influence of each sample. No array of size N x K is allocated.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.evaluation.bins import NUM_BINS
from boxcal.calibrators.evaluation.outcomes import ROWS_AT_ONCE, Indices, Outcomes, Tell, Vector, silent
from boxcal.calibrators.threads import over_blocks

Matrix = NDArray[np.float64]
Pair = tuple[Vector, Vector]


_EDGES = np.linspace(0.0, 1.0, NUM_BINS + 1)[1:-1]


def cell_indices(rows: Matrix) -> Indices:
    """Return the cell k * 15 + m of each probability (n, K): class k, bin m of equal width."""
    from boxcal.calibrators.evaluation import loops  # noqa: PLC0415 - numba loads when needed

    cells = np.empty(rows.shape, dtype=np.int64)
    loops.fill_cells(rows, _EDGES, cells)
    return cells


class ClassCells:
    """Sums over the K x 15 cells."""

    def __init__(self, scored: Outcomes, tell: Tell = silent) -> None:
        from boxcal.calibrators.evaluation import loops  # noqa: PLC0415 - numba loads when needed

        self.samples, self.num_classes = scored.probabilities.shape
        cells = self.num_classes * NUM_BINS
        self.count, self.mass, self.hits = np.zeros(cells), np.zeros(cells), np.zeros(cells)
        squares, implied = np.zeros(cells), np.zeros(cells)
        weights = np.ones(self.samples) if scored.weights is None else scored.weights

        def work(part: slice) -> Matrix:
            rows = scored.probabilities.at(part)
            sums = np.zeros((6, cells))
            loops.tally(rows, cell_indices(rows), scored.labels[part], weights[part], sums)
            return sums

        for place, sums in enumerate(over_blocks(work, self.samples, ROWS_AT_ONCE)):
            self.count += sums[0]
            self.mass += sums[1]
            self.hits += sums[2]
            squares += sums[3]
            squares += sums[4]
            implied += sums[5]
            tell(min(1.0, (place + 1) * ROWS_AT_ONCE / self.samples))
        gap = self.mass - self.hits
        self.variance = np.maximum(np.maximum(squares - gap**2 / self.samples, implied), 0.0)
        self.inflation = 1.0  # By how much groups raise the mean of a perfect `brier_calibration`
        if scored.groups is not None:
            alone, groups = self.variance, np.unique(scored.groups, return_inverse=True)[1].astype(np.int64)
            squares += _shared_squares(scored, groups, weights, cells)
            self.variance = np.maximum(squares - gap**2 / (int(groups.max()) + 1), alone)
            self.inflation = (self.variance / self.sizes).sum() / max((alone / self.sizes).sum(), 1e-300)

    def influences(self, scored: Outcomes, tell: Tell = silent) -> list[Vector]:
        """Return sum over classes k of weights[cell] * (p_k - 1{y = k}) of each sample, twice (N,).

        The weights are the sign of the cell's gap, mass - hits, and its gap over its number.
        """
        gap = self.mass - self.hits
        weights = np.sign(gap), gap / self.sizes

        def work(part: slice) -> list[Vector]:
            rows = scored.probabilities.at(part)
            cell = cell_indices(rows)
            at_label = cell[np.arange(len(rows)), scored.labels[part]]
            return [np.einsum("nk,nk->n", one[cell], rows) - one[at_label] for one in weights]

        parts = []
        for part in over_blocks(work, self.samples, ROWS_AT_ONCE):
            parts.append(part)
            tell(min(1.0, len(parts) * ROWS_AT_ONCE / self.samples))
        found = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return found if scored.weights is None else [scored.weights * column for column in found]

    @property
    def mean_probabilities(self) -> Vector:
        """Return the mean probability of each class (K,)."""
        means: Vector = self.mass.reshape(self.num_classes, NUM_BINS).sum(axis=1) / self.samples
        return means

    @property
    def sizes(self) -> Vector:
        """How often each cell is hit by a probability; 1 where that is never."""
        return np.where(self.count > 0, self.count, 1.0)

    def classwise_ece(self, hits: NDArray[Any]) -> Matrix:
        """Return the classwise ECE of hits (15 K, ...)."""
        gap = np.abs(self.mass.reshape(-1, *[1] * (hits.ndim - 1)) - hits)
        result: Matrix = gap.sum(axis=0) / (self.samples * self.num_classes)
        return result

    def brier_calibration(self, hits: NDArray[Any]) -> Matrix:
        """Return the calibration part of the Brier score of hits (15 K, ...)."""
        shape = (-1, *[1] * (hits.ndim - 1))
        gap = self.mass.reshape(shape) - hits
        result: Matrix = (gap**2 / self.sizes.reshape(shape)).sum(axis=0) / self.samples
        return result


def _shared_squares(scored: Outcomes, groups: Indices, weights: Vector, cells: int) -> Vector:
    """Return by how much groups (N,) of samples raise the sums of squared residuals (cells,)."""
    from boxcal.calibrators.evaluation import loops  # noqa: PLC0415 - numba loads when needed

    order = np.argsort(groups, kind="stable")
    order = order[np.bincount(groups)[groups[order]] > 1]
    squares, open_sums = np.zeros(cells), np.zeros(cells + 1)
    for start in range(0, len(order), ROWS_AT_ONCE):
        part = order[start : start + ROWS_AT_ONCE]
        rows = scored.probabilities.at(part)
        residuals = rows.copy()
        residuals[np.arange(len(part)), scored.labels[part]] -= 1.0
        residuals *= weights[part, None]
        loops.tally_groups(residuals, cell_indices(rows), groups[part], open_sums, squares)
    result: Vector = squares + open_sums[:-1] ** 2
    return result


class _Influenced:
    """A metric whose deviations are the influence of its samples plus a known bias and its variance."""

    name: str
    value: float
    centre: float
    statistic: float
    perfect_scale: float = 1.0
    _influence: Vector
    _excess: float
    _stretch: float

    def noise(self, surplus: Matrix) -> Matrix:
        """Return the change of the value if sample i has the weight 1 + surplus[i]: (1, R)."""
        moved: Matrix = (self._influence @ surplus)[None, :] / len(surplus)
        return moved

    def deviations(self, noise: Matrix) -> Pair:
        """Return the deviations of the value above and below the truth, one number per draw."""
        return self._excess + self._stretch * noise[0], noise[0]


class ClasswiseError(_Influenced):
    """Classwise ECE: the mean over classes of the ECE of their probabilities, 15 bins of equal width.

    (Kull et al. 2019; the static calibration error of Nixon et al. 2019.)
    """

    name = "classwise_ece"

    def __init__(self, scored: Outcomes, cells: ClassCells, by_sign: Vector) -> None:
        self.value = self.statistic = self.centre = float(cells.classwise_ece(cells.hits))
        scale = cells.samples * cells.num_classes
        gap = cells.mass - cells.hits
        spread = np.sqrt(cells.variance)
        kept = np.where(np.abs(gap) > 3 * spread, np.abs(gap), 0.0)
        self._excess = float((_mean_absolute(kept, spread) - kept).sum()) / scale
        self._influence = by_sign / cells.num_classes
        # no signs can give an influence beyond sum_k |p_k - 1{y = k}| = 2 (1 - p_y)
        reach = scored.weighted(2 * (1 - np.exp(-scored.nll))[:, None])
        most = math.sqrt(float(np.mean(reach**2))) / cells.num_classes
        self._stretch = most / max(float(self._influence.std()), 1e-300) if most > 0 else 1.0


class BrierCalibration(_Influenced):
    """Calibration part of the Brier score: squared gaps of the K x 15 cells, weighted by their size.

    (Murphy 1973, class by class.) A square: its root is a norm, whose deviations are squared again here.
    """

    name = "brier_calibration"

    def __init__(self, cells: ClassCells, by_gap: Vector) -> None:
        self.value = self.statistic = self.centre = float(cells.brier_calibration(cells.hits))
        self.perfect_scale = cells.inflation
        self._root = math.sqrt(self.value)
        count = cells.sizes
        self._excess = math.sqrt(float((cells.variance / count).sum()) / cells.samples)
        self._influence = by_gap / max(self._root, 1e-300)
        # a unit combination of residuals has variance at most the largest probability of a cell's class
        rate = np.maximum(cells.mass, cells.hits) / count
        self._stretch = math.sqrt(float(rate.max())) / max(float(self._influence.std()), 1e-300)

    def deviations(self, noise: Matrix) -> Pair:
        """Return the deviations of the value above and below the truth, one number per draw."""
        above, below = super().deviations(noise)
        return self._squared(above), self._squared(below)

    def _squared(self, deviation: Vector) -> Vector:
        within = np.minimum(deviation, self._root)
        squared: Vector = 2 * self._root * within - within**2
        return squared


class BrierRefinement(_Influenced):
    """Refinement part of the Brier score: its value if every cell were perfectly calibrated."""

    name = "brier_refinement"

    def __init__(self, scored: Outcomes, cells: ClassCells, by_gap: Vector) -> None:
        brier = scored.mean(scored.brier)
        self.value = float(brier - cells.brier_calibration(cells.hits))
        self.statistic = self.value
        count = cells.sizes
        bias = float((cells.variance / count).sum()) / cells.samples
        self.centre = self.value
        self._influence = scored.brier - 2 * by_gap
        if scored.weights is not None:  # the weighted mean is a ratio
            self._influence = scored.weights * (scored.brier - brier) - 2 * by_gap
        self._influence -= self._influence.mean()
        self._bias = bias
        self._excess, self._stretch = 0.0, 1.0

    def deviations(self, noise: Matrix) -> Pair:
        """Return the deviations of the value above and below the truth, one number per draw."""
        return noise[0], noise[0] - self._bias


def _mean_absolute(mean: Vector, spread: Vector) -> Vector:
    """Mean of |x| for x normal with these means and standard deviations."""
    ratio = np.divide(mean, spread, out=np.full_like(mean, 40.0), where=spread > 0)
    density = np.exp(-0.5 * ratio**2) / math.sqrt(2 * math.pi)
    below = np.vectorize(NormalDist().cdf, otypes=[float])(-ratio)
    result: Vector = 2 * spread * density + mean * (1 - 2 * below)
    return result
