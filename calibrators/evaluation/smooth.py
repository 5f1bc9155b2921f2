"""Smooth ECE (smECE): the calibration error after smoothing with a kernel whose bandwidth is the error.

Błasiok and Nakkiran, "Smooth ECE: Principled Reliability Diagrams via Kernel Smoothing" (ICLR 2024), with the
Gaussian kernel reflected at 0 and 1.

The discretisation (grid sizes, bisection) is that of the authors' package relplot 1.0.3, so that values
agree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.evaluation.outcomes import Vector

SMALLEST_BANDWIDTH = 0.001
BISECTIONS = 10
FEWEST_POINTS = 200
DENSITY_FLOOR = 1e-4

Matrix = NDArray[np.float64]


class SmoothedResiduals:
    """Rows of residuals at fixed confidences that can be smoothed with any bandwidth.

    Parameters
    ----------
    confidence : float64 (N,)
        Confidences of the residuals.
    residuals : float64 (N, R)
        R sets of residuals for the same confidences: one for a value, many for a simulation.
    """

    def __init__(self, confidence: Vector, residuals: Matrix) -> None:
        order = np.argsort(confidence, kind="stable")
        self._confidence = confidence[order]
        self._residuals = residuals[order]
        self._spectra: dict[int, tuple[Matrix, Vector]] = {}

    def at(self, bandwidth: float, rows: slice | NDArray[np.int64], points: int | None = None) -> Matrix:
        """Smooth on a uniform mesh of [0, 1], (points, R), scaled so that absolute sums are errors."""
        cells = self._cells(bandwidth)
        residual_spectrum, density_spectrum = self._spectra[cells]
        kernel = _kernel_spectrum(bandwidth, cells)
        mesh = np.linspace(0.0, 1.0, points or max(round(10 / bandwidth), FEWEST_POINTS))
        density = _interpolate(np.fft.irfft(density_spectrum * kernel, 2 * cells - 2)[:cells], mesh)
        smoothed = np.fft.irfft(residual_spectrum[:, rows] * kernel[:, None], 2 * cells - 2, axis=0)[:cells]
        scaled: Matrix = _interpolate(smoothed, mesh) / (density + DENSITY_FLOOR).sum()
        return scaled

    def curve(self, bandwidth: float, mesh: Vector) -> tuple[Matrix, Vector]:
        """Return the mean residual near each mesh point (points, R), and its sample weight (points,).

        A sample at distance u has the weight exp(-(u / bandwidth)^2 / 2); the mean is 0 if none is near.
        """
        cells = self._cells(bandwidth)
        residual_spectrum, density_spectrum = self._spectra[cells]
        kernel = _kernel_spectrum(bandwidth, cells) * (np.sqrt(2 * np.pi) * bandwidth)
        near = _interpolate(np.fft.irfft(density_spectrum * kernel, 2 * cells - 2)[:cells], mesh)
        sums = np.fft.irfft(residual_spectrum * kernel[:, None], 2 * cells - 2, axis=0)[:cells]
        means = _interpolate(sums, mesh) / np.maximum(near, DENSITY_FLOOR)[:, None]
        return means, near

    def errors(self, bandwidths: Vector) -> Vector:
        """Return the smooth calibration error of each row at its own bandwidth, (R,)."""
        result = np.empty(len(bandwidths))
        for bandwidth in np.unique(bandwidths):
            rows = np.flatnonzero(bandwidths == bandwidth)
            result[rows] = np.abs(self.at(float(bandwidth), rows)).sum(axis=0)
        return result

    def _cells(self, bandwidth: float) -> int:
        """Prepare the grid for this bandwidth, once, and return its number of points."""
        cells = max(2000, round(20 / bandwidth)) // 2 + 1
        if cells not in self._spectra:
            self._spectra[cells] = (
                _spectrum(_to_grid(self._confidence, self._residuals, cells)),
                _spectrum(_to_grid(self._confidence, np.ones((len(self._confidence), 1)), cells))[:, 0],
            )
        return cells

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


def smooth_fixed_point(confidence: Vector, correct: Vector) -> tuple[float, float]:
    """Return smECE and its bandwidth for confidences (N,) and outcomes (N,) of 0 and 1."""
    value, bandwidth = SmoothedResiduals(confidence, (confidence - correct)[:, None]).fixed_points()
    return float(value[0]), float(bandwidth[0])


def _to_grid(confidence: Vector, values: Matrix, cells: int) -> Matrix:
    """Distribute the values (N, R) of the sorted samples to their neighbouring grid points: (cells, R)."""
    place = confidence * (cells - 1)
    left = np.minimum(place.astype(np.int64), cells - 2)
    share = (place - left)[:, None]
    starts = np.flatnonzero(np.diff(left, prepend=-1))
    grid = np.zeros((cells, values.shape[1]))
    grid[left[starts]] += np.add.reduceat(values * (1 - share), starts, axis=0)
    grid[left[starts] + 1] += np.add.reduceat(values * share, starts, axis=0)
    return grid


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
