"""Smooth ECE (smECE): the calibration error after smoothing with a kernel whose bandwidth is the error.

Błasiok and Nakkiran, "Smooth ECE: Principled Reliability Diagrams via Kernel Smoothing" (ICLR 2024), with the
Gaussian kernel reflected at 0 and 1.

The discretisation (grid sizes, bandwidths in steps of 1 / 1024) is that of the authors' package relplot
1.0.3, so that values agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.evaluation.outcomes import Indices, Vector

SMALLEST_BANDWIDTH = 0.001
STEPS = 1024
FIRST_STEP = 32
SLACK = 0.05
"""How much the error at one bandwidth may exceed, or fall short of, that at another; relative."""
FEWEST_POINTS = 200
DENSITY_FLOOR = 1e-4
DRAWN_AT_ONCE = 4096
NEGLIGIBLE = 1e-13
"""Of the largest entry of a spectrum: frequencies from where it stays below are left out."""
LARGEST_MATRIX = 1 << 17
"""Entries of a matrix that smooths, up to which it is two to twenty times as fast as a Fourier transform."""

Matrix = NDArray[np.float64]


class Confidences:
    """Confidences (N,) of samples, prepared for the smoothing of any residuals.

    `confidence`: float64 (N,). `weights`: float64 (N,), how much each sample counts, of mean 1.
    """

    def __init__(self, confidence: Vector, weights: Vector | None = None) -> None:
        self.confidence, self.weights = confidence, weights
        self._places: dict[int, tuple[Indices, Vector]] = {}
        self._densities: dict[int, Matrix] = {}

    def places(self, cells: int) -> tuple[Indices, Vector]:
        """Return the grid point below each confidence, and the share of the point above it."""
        if cells not in self._places:
            self._places[cells] = _neighbours(self.confidence, cells)
        return self._places[cells]

    def density(self, bandwidth: float, points: int) -> Vector:
        """Smooth the number of samples, and return it at so many mesh points."""
        cells = grid_size(bandwidth)
        if cells not in self._densities:
            self._densities[cells] = _spectrum(self._counts(cells))[None]
        density: Vector = smoother(bandwidth, points)(self._densities[cells], slice(None))[0]
        return density

    def _counts(self, cells: int) -> Vector:
        counts = np.ones(len(self.confidence)) if self.weights is None else self.weights
        return self.to_grid(counts[:, None], cells)[:, 0]

    def to_grid(self, values: Matrix, cells: int, columns: Indices | None = None) -> Matrix:
        """Distribute the values (N, R) of the samples to their neighbouring grid points: (cells, R).

        `columns`: the numbers of those of R that are distributed, all by default.
        """
        from boxcal.calibrators.evaluation import loops  # noqa: PLC0415 - numba loads when needed

        chosen = np.arange(values.shape[1]) if columns is None else columns
        grid = np.zeros((cells, len(chosen)))
        loops.add_to_grid(*self.places(cells), values, chosen, grid)
        return grid

    def drawn_to_grid(self, correct: Vector, rng: np.random.Generator, draws: int, cells: int) -> Matrix:
        """Distribute the residuals of the outcomes, and of outcomes drawn from the confidences.

        Returns the grid (cells, 1 + draws); the first column is of `correct`.
        """
        from boxcal.calibrators.evaluation import loops  # noqa: PLC0415 - numba loads when needed

        left, share = self.places(cells)
        drawn = np.zeros((cells, draws))
        counts = np.ones(len(left)) if self.weights is None else self.weights
        for start in range(0, len(left), DRAWN_AT_ONCE):
            part = slice(start, start + DRAWN_AT_ONCE)
            uniform = rng.random((len(left[part]), draws))
            places = left[part], share[part], self.confidence[part], counts[part]
            loops.add_drawn_to_grid(*places, uniform, drawn)
        residuals = (self.confidence - correct) * counts
        return np.column_stack([self.to_grid(residuals[:, None], cells), drawn])

    def curve(self, grid: Matrix, bandwidth: float, mesh: Vector) -> tuple[Matrix, Vector]:
        """Return the mean residual near each mesh point (points, R), and its sample weight (points,).

        `grid` (cells, R) holds the residuals. A sample at distance u has the weight
        exp(-(u / bandwidth)^2 / 2); the mean is 0 if none is near.
        """
        weights = _kernel_weights(bandwidth, mesh, len(grid)) * (np.sqrt(2 * np.pi) * bandwidth)
        near = weights @ self._counts(len(grid))
        return weights @ grid / np.maximum(near, DENSITY_FLOOR)[:, None], near


class SmoothedResiduals:
    """Rows of residuals at fixed confidences that can be smoothed with any bandwidth.

    `residuals`: float64 (N, R), r sets of residuals for the same confidences: one for a value, many for a
    simulation.
    """

    def __init__(self, confidences: Confidences, residuals: Matrix) -> None:
        self._confidences, self._residuals = confidences, residuals
        self._spectra: dict[int, Matrix] = {}

    def at(self, bandwidth: float, rows: Indices | None = None, points: int | None = None) -> Matrix:
        """Smooth on a uniform mesh of [0, 1], (R, points), scaled so that absolute sums are errors."""
        chosen = np.arange(self._residuals.shape[1]) if rows is None else rows
        points = points or max(round(10 / bandwidth), FEWEST_POINTS)
        smoothed = smoother(bandwidth, points)(self._spectra_of(grid_size(bandwidth), chosen), chosen)
        smoothed /= (self._confidences.density(bandwidth, points) + DENSITY_FLOOR).sum()
        return smoothed

    def errors(self, bandwidths: Vector, rows: Indices) -> Vector:
        """Return the smooth calibration error of each of some rows at its own bandwidth, (n,)."""
        result = np.empty(len(rows))
        for bandwidth in np.unique(bandwidths):
            same = bandwidths == bandwidth
            result[same] = np.abs(self.at(float(bandwidth), rows[same])).sum(axis=1)
        return result

    def _spectra_of(self, cells: int, rows: Indices) -> Matrix:
        """Return the spectra (R, frequencies) on a grid, those of some rows computed; each is once."""
        if cells not in self._spectra:
            self._spectra[cells] = np.full((self._residuals.shape[1], cells), np.nan)
        spectra = self._spectra[cells]
        new = rows[np.isnan(spectra[rows, 0])]
        if len(new):
            spectra[new] = _spectrum(self._confidences.to_grid(self._residuals, cells, new).T)
        return spectra

    def fixed_points(self) -> tuple[Vector, Vector]:
        """Return smECE (R,) and its bandwidth (R,): the first of a grid at which the error is not larger.

        The error hardly changes with the bandwidth, and mostly falls. So a bandwidth h with error e encloses
        the one wanted: it lies between h and e, apart from some `SLACK`. Within that it is bisected.
        """
        count = self._residuals.shape[1]
        below = np.full(count, math.ceil(SMALLEST_BANDWIDTH * STEPS) - 1)
        found, values = np.full(count, STEPS), np.full(count, np.nan)
        tried = np.full(count, FIRST_STEP)
        while len(rows := np.flatnonzero(found - below > 1)):
            step = tried[rows]
            errors = self.errors(step / STEPS, rows)
            least = np.floor(errors * STEPS * (1 - SLACK)).astype(np.int64) - 1
            most = np.ceil(errors * STEPS * (1 + SLACK)).astype(np.int64) + 1
            is_below = errors * STEPS > step
            short, enough = rows[is_below], rows[~is_below]
            below[short] = step[is_below]
            values[short[most[is_below] < found[short]]] = np.nan
            found[short] = np.minimum(found[short], most[is_below])
            found[enough], values[enough] = step[~is_below], errors[~is_below]
            below[enough] = np.maximum(below[enough], np.minimum(least[~is_below], step[~is_below] - 1))
            # Between them the multiple of the largest power of two, so that rows share bandwidths.
            _, bits = np.frexp(below ^ (found - 1))
            tried = (found - 1) >> (bits - 1) << (bits - 1)
        if len(rows := np.flatnonzero(np.isnan(values))):
            values[rows] = self.errors(found[rows] / STEPS, rows)
        return values, found / STEPS


def grid_size(bandwidth: float) -> int:
    """Return the number of grid points for a bandwidth."""
    return max(2000, round(20 / bandwidth)) // 2 + 1


@lru_cache(maxsize=128)
def smoother(bandwidth: float, points: int) -> Callable[[Matrix, Indices | slice], Matrix]:
    """Return what smooths some rows of spectra (R, frequencies), at a uniform mesh of [0, 1]: (n, points).

    Between two grid points it interpolates linearly. A spectrum is as `_spectrum` gives it.
    """
    cells = grid_size(bandwidth)
    spectrum = np.fft.rfft(_kernel(bandwidth, cells))
    length = int(np.flatnonzero(np.abs(spectrum) > NEGLIGIBLE * np.abs(spectrum[0]))[-1]) + 1
    kernel = spectrum[:length]
    left, share = _neighbours(np.linspace(0.0, 1.0, points), cells)

    def transformed(spectra: Matrix, rows: Indices | slice) -> Matrix:
        values = np.fft.irfft(spectra[rows, :length] * kernel, 2 * cells - 2)
        between: Matrix = values[:, left] * (1 - share) + values[:, left + 1] * share
        return between

    if length * points > LARGEST_MATRIX:
        return transformed
    matrix = transformed(np.eye(length), slice(None))
    return lambda spectra, rows: spectra[rows, :length] @ matrix


def _neighbours(points: Vector, cells: int) -> tuple[Indices, Vector]:
    """Return the grid point below each point of [0, 1], and the share of the grid point above it."""
    place = points * (cells - 1)
    left = np.minimum(place.astype(np.int64), cells - 2)
    return left, place - left


def _spectrum(grid: Matrix) -> Matrix:
    """Fourier transform of a grid (..., cells) reflected at 0 and 1; real, as the reflected grid is even."""
    return np.fft.rfft(np.concatenate([grid, grid[..., -2:0:-1]], axis=-1)).real


def _kernel(bandwidth: float, cells: int) -> Vector:
    """Sample the Gaussian kernel at `cells` points of [-1/2, 1/2], on a circle that begins at 0."""
    offset = np.linspace(-0.5, 0.5, cells)
    kernel = np.exp(-0.5 * (offset / bandwidth) ** 2) / (np.sqrt(2 * np.pi) * bandwidth)
    circle = np.zeros(2 * cells - 2)
    circle[(np.arange(cells) - cells // 2) % len(circle)] = kernel
    return circle


def _kernel_weights(bandwidth: float, mesh: Vector, cells: int) -> Matrix:
    """Return the weight of each grid point at each mesh point, reflected at 0 and 1: (points, cells)."""
    circle, point = _kernel(bandwidth, cells), np.arange(cells)
    left, share = _neighbours(mesh, cells)

    def around(centre: Indices) -> Matrix:
        reflected = circle[(centre[:, None] + point) % len(circle)]
        reflected[:, [0, -1]] = 0.0  # the ends are their own reflections
        total: Matrix = circle[(centre[:, None] - point) % len(circle)] + reflected
        return total

    weights: Matrix = around(left) * (1 - share)[:, None] + around(left + 1) * share[:, None]
    return weights
