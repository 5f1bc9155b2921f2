"""Smooth ECE (smECE): the calibration error after smoothing with a kernel whose bandwidth is the error.

Błasiok and Nakkiran, "Smooth ECE: Principled Reliability Diagrams via Kernel Smoothing" (ICLR 2024), with the
Gaussian kernel reflected at 0 and 1.

The discretisation (grid sizes, bisection) is that of the authors' package relplot 1.0.3, so that values
agree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.evaluation.outcomes import Indices, Vector

SMALLEST_BANDWIDTH = 0.001
BISECTIONS = 10
FEWEST_POINTS = 200
DENSITY_FLOOR = 1e-4
DRAWN_AT_ONCE = 4096

Matrix = NDArray[np.float64]


class Confidences:
    """Confidences (N,) of samples, prepared for the smoothing of any residuals.

    `confidence`: float64 (N,). `weights`: float64 (N,), how much each sample counts, of mean 1.
    """

    def __init__(self, confidence: Vector, weights: Vector | None = None) -> None:
        self.confidence, self.weights = confidence, weights
        self._places: dict[int, tuple[Indices, Vector]] = {}
        self._densities: dict[int, Vector] = {}
        self._kernels: dict[float, NDArray[np.complex128]] = {}

    def places(self, cells: int) -> tuple[Indices, Vector]:
        """Return the grid point below each confidence, and the share of the point above it."""
        if cells not in self._places:
            place = self.confidence * (cells - 1)
            left = np.minimum(place.astype(np.int64), cells - 2)
            self._places[cells] = left, place - left
        return self._places[cells]

    def kernel(self, bandwidth: float) -> NDArray[np.complex128]:
        """Return the spectrum of the kernel on the grid of a bandwidth."""
        if bandwidth not in self._kernels:
            self._kernels[bandwidth] = _kernel_spectrum(bandwidth, grid_size(bandwidth))
        return self._kernels[bandwidth]

    def density(self, bandwidth: float, mesh: Vector) -> Vector:
        """Smooth the number of samples, and return it at each mesh point."""
        cells = grid_size(bandwidth)
        if cells not in self._densities:
            counts = np.ones(len(self.confidence)) if self.weights is None else self.weights
            self._densities[cells] = _spectrum(self.to_grid(counts[:, None], cells))[:, 0]
        smoothed = np.fft.irfft(self._densities[cells] * self.kernel(bandwidth), 2 * cells - 2)[:cells]
        return _interpolate(smoothed, mesh)

    def to_grid(self, values: Matrix, cells: int) -> Matrix:
        """Distribute the values (N, R) of the samples to their neighbouring grid points: (cells, R)."""
        from boxcal.calibrators.evaluation import loops  # noqa: PLC0415 - numba loads when needed

        grid = np.zeros((cells, values.shape[1]))
        loops.add_to_grid(*self.places(cells), values, grid)
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
        cells, scale = len(grid), np.sqrt(2 * np.pi) * bandwidth
        near = self.density(bandwidth, mesh) * scale
        kernel = self.kernel(bandwidth) * scale
        sums = np.fft.irfft(_spectrum(grid) * kernel[:, None], 2 * cells - 2, axis=0)[:cells]
        return _interpolate(sums, mesh) / np.maximum(near, DENSITY_FLOOR)[:, None], near


class SmoothedResiduals:
    """Rows of residuals at fixed confidences that can be smoothed with any bandwidth.

    `residuals`: float64 (N, R), r sets of residuals for the same confidences: one for a value, many for a
    simulation.
    """

    def __init__(self, confidences: Confidences, residuals: Matrix) -> None:
        self._confidences, self._residuals = confidences, residuals
        self._spectra: dict[int, Matrix] = {}

    def at(self, bandwidth: float, rows: Indices | None = None, points: int | None = None) -> Matrix:
        """Smooth on a uniform mesh of [0, 1], (points, R), scaled so that absolute sums are errors."""
        cells = grid_size(bandwidth)
        chosen = np.arange(self._residuals.shape[1]) if rows is None else rows
        smoothed_spectrum = self._spectrum(cells, chosen) * self._confidences.kernel(bandwidth)[:, None]
        mesh = np.linspace(0.0, 1.0, points or max(round(10 / bandwidth), FEWEST_POINTS))
        density = self._confidences.density(bandwidth, mesh)
        smoothed = np.fft.irfft(smoothed_spectrum, 2 * cells - 2, axis=0)[:cells]
        scaled: Matrix = _interpolate(smoothed, mesh) / (density + DENSITY_FLOOR).sum()
        return scaled

    def errors(self, bandwidths: Vector) -> Vector:
        """Return the smooth calibration error of each row at its own bandwidth, (R,)."""
        result = np.empty(len(bandwidths))
        for bandwidth in np.unique(bandwidths):
            rows = np.flatnonzero(bandwidths == bandwidth)
            result[rows] = np.abs(self.at(float(bandwidth), rows)).sum(axis=0)
        return result

    def _spectrum(self, cells: int, rows: Indices) -> Matrix:
        """Return the spectra (frequencies, n) of some rows on a grid; each is computed once."""
        if cells not in self._spectra:
            self._spectra[cells] = np.full((cells, self._residuals.shape[1]), np.nan)
        spectra = self._spectra[cells]
        new = rows[np.isnan(spectra[0, rows])]
        if len(new):
            spectra[:, new] = _spectrum(self._confidences.to_grid(self._residuals[:, new], cells))
        found: Matrix = spectra[:, rows]
        return found

    def fixed_points(self) -> tuple[Vector, Vector]:
        """Return smECE (R,) and its bandwidth (R,), by bisection for error = bandwidth."""
        count = self._residuals.shape[1]
        high, low = np.ones(count), np.zeros(count)
        settled = self.errors(high) > 1.0
        for _ in range(BISECTIONS):
            middle = np.where(settled, high, (high + low) / 2)
            below = (middle < SMALLEST_BANDWIDTH) | (middle < self.errors(middle))
            low = np.where(below, middle, low)
            high = np.where(below, high, middle)
        return self.errors(high), high


def grid_size(bandwidth: float) -> int:
    """Return the number of grid points for a bandwidth."""
    return max(2000, round(20 / bandwidth)) // 2 + 1


def _spectrum(grid: Matrix) -> Matrix:
    """Fourier transform of the grid reflected at 0 and 1; real, as the reflected grid is even."""
    mirrored = np.concatenate([grid, grid[-2:0:-1]])
    return np.ascontiguousarray(np.fft.rfft(mirrored, axis=0).real)


def _kernel_spectrum(bandwidth: float, cells: int) -> NDArray[np.complex128]:
    """Fourier transform of the Gaussian kernel, sampled on `cells` points of [-1/2, 1/2]."""
    offset = np.linspace(-0.5, 0.5, cells)
    kernel = np.exp(-0.5 * (offset / bandwidth) ** 2) / (np.sqrt(2 * np.pi) * bandwidth)
    circle = np.zeros(2 * cells - 2)
    circle[(np.arange(cells) - cells // 2) % len(circle)] = kernel
    return np.fft.rfft(circle)


def _interpolate(values: Matrix, mesh: Vector) -> Matrix:
    """Interpolate values on a uniform grid of [0, 1], (cells, ...), linearly at each mesh point."""
    place = mesh * (len(values) - 1)
    left = np.minimum(place.astype(np.int64), len(values) - 2)
    share = (place - left).reshape(-1, *[1] * (values.ndim - 1))
    between: Matrix = values[left] * (1 - share) + values[left + 1] * share
    return between
