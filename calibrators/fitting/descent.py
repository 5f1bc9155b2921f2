"""The descents that every fit is made of: bounded quasi-Newton from many starts, restarts near the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.stats import qmc

from boxcal.calibrators.parametrised import Limits

Array = np.ndarray[Any, Any]
Objective = Callable[[Array], tuple[float, Array]]
"""Coordinates to the loss and its gradient."""

AGREE_WITHIN = 1e-6
PATIENCE = 15
"""Iterations without a better held-out loss after which a network's descent stops."""


@dataclass(frozen=True)
class Minimum:
    """The lowest point found, and how the descents agreed."""

    coordinates: Array
    value: float
    gradient_norm: float
    starts: int
    starts_agreeing: int
    evaluations: int


def descend(
    objective: Objective,
    start: Array,
    limits: Limits | None,
    *,
    iterations: int = 500,
    tolerance: float = 1e-14,
    callback: Callable[[Array], None] | None = None,
) -> tuple[Array, float, int]:
    """Go down from one start by L-BFGS-B; return coordinates, value and the number of evaluations."""
    if start.size == 0:
        return start, objective(start)[0], 1
    found = minimize(  # type: ignore[call-overload] # its stubs want arrays of one named dimension
        objective,
        start,
        jac=True,
        method="L-BFGS-B",
        bounds=limits,
        callback=callback,
        options={
            "maxiter": iterations,
            "maxfun": 2 * iterations,
            "maxcor": 20,
            "ftol": tolerance,
            "gtol": 1e-9,
        },
    )
    return np.asarray(found.x), float(found.fun), int(found.nfev)


def projected_gradient(objective: Objective, coordinates: Array, limits: Limits | None) -> float:
    """Largest entry of the gradient, without what points out of the limits."""
    if coordinates.size == 0:
        return 0.0
    gradient = np.array(objective(coordinates)[1], copy=True)
    for index, (low, high) in enumerate(limits or ()):
        stuck_low = low is not None and coordinates[index] <= low and gradient[index] > 0
        stuck_high = high is not None and coordinates[index] >= high and gradient[index] < 0
        if stuck_low or stuck_high:
            gradient[index] = 0.0
    return float(np.abs(gradient).max())


def best_of(
    objective: Objective,
    starts: Sequence[Array],
    limits: Limits | None = None,
    *,
    perturbations: int = 0,
    reach: float = 0.5,
    tolerance: float = 1e-14,
    seed: int = 0,
    tick: Callable[[float], None] | None = None,
) -> Minimum:
    """Descend from every start, then from points hopped to around the best, and keep the lowest.

    A loss of bounded probabilities has a kink wherever one more sample comes to sit at a bound, and so its
    minima come in clusters, the wider the fewer the samples: perturbations
    of shrinking radius look for the lowest.
    """
    ends: list[tuple[Array, float]] = []
    evaluations = 0
    total = len(starts) + perturbations
    for index, start in enumerate(starts):
        end, value, used = descend(
            objective, np.asarray(start, dtype=np.float64), limits, tolerance=tolerance
        )
        ends.append((end, value))
        evaluations += used
        if tick:
            tick((index + 1) / total)
    best, lowest = min(ends, key=lambda pair: pair[1])
    agreeing = sum(value <= lowest + AGREE_WITHIN for _, value in ends)
    if perturbations and best.size:
        low, high = _edges(limits, best.size)
        steps = qmc.Halton(best.size, seed=seed).random(perturbations) * 2.0 - 1.0
        for index, step in enumerate(steps):
            start = np.clip(best + reach * 0.02 ** (index / perturbations) * step, low, high)
            end, value, used = descend(objective, start, limits, iterations=25)
            evaluations += used
            if value < lowest:
                best, lowest = end, value
            if tick:
                tick((len(starts) + index + 1) / total)
    gradient_norm = projected_gradient(objective, best, limits)
    return Minimum(best, lowest, gradient_norm, len(starts), agreeing, evaluations)


def best_held_out(
    objective: Objective,
    held_out: Objective,
    starts: Sequence[Array],
    limits: Limits | None = None,
    *,
    tick: Callable[[float], None] | None = None,
) -> Minimum:
    """Descend from every start and keep the point on the way that is best on held-out samples.

    The answer's value is the held-out loss.
    """
    best, lowest, evaluations = np.asarray(starts[0]), math.inf, 0
    ends: list[float] = []
    for index, start in enumerate(starts):
        watch = _Watch(held_out, start)
        _, _, used = descend(objective, start, limits, iterations=200, tolerance=1e-9, callback=watch)
        evaluations += used + watch.calls
        ends.append(watch.lowest)
        if watch.lowest < lowest:
            best, lowest = watch.best, watch.lowest
        if tick:
            tick((index + 1) / len(starts))
    agreeing = sum(value <= lowest + AGREE_WITHIN for value in ends)
    return Minimum(
        best, lowest, projected_gradient(objective, best, limits), len(starts), agreeing, evaluations
    )


class _Watch:
    """Follows a descent on held-out samples, and stops it once they gain nothing more."""

    def __init__(self, held_out: Objective, start: Array) -> None:
        self.held_out = held_out
        self.best, self.lowest = np.array(start, copy=True), held_out(start)[0]
        self.calls, self.since = 1, 0

    def __call__(self, coordinates: Array) -> None:
        value = self.held_out(coordinates)[0]
        self.calls += 1
        self.since += 1
        if value < self.lowest:
            self.best, self.lowest, self.since = np.array(coordinates, copy=True), value, 0
        if self.since >= PATIENCE:
            raise StopIteration


def local_minima(objective: Objective, line: Array, most: int) -> list[Array]:
    """Give the points along a line that are lower than their neighbours, the lowest first."""
    values = np.array([objective(point)[0] for point in line])
    padded = np.pad(values, 1, constant_values=math.inf)
    lower = np.flatnonzero((values <= padded[:-2]) & (values < padded[2:]))
    return [line[index] for index in lower[np.argsort(values[lower], kind="stable")][:most]]


def distinct(points: Iterable[Array], apart: float, most: int) -> list[Array]:
    """Keep the first of the points, then each that differs by `apart` in some coordinate from all kept."""
    kept: list[Array] = []
    for point in points:
        if len(kept) < most and all(np.abs(point - other).max() > apart for other in kept):
            kept.append(point)
    return kept


def _edges(limits: Limits | None, size: int) -> tuple[Array, Array]:
    """Return the limits as two vectors, infinite where there is none."""
    pairs = limits or [(None, None)] * size
    low = np.array([-math.inf if low is None else low for low, _ in pairs])
    high = np.array([math.inf if high is None else high for _, high in pairs])
    return low, high
