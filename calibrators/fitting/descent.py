"""The descents that every fit is made of: bounded quasi-Newton from many starts, restarts near the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.optimize import OptimizeResult, minimize

from boxcal.calibrators.maps.parameters import Limits

Array = np.ndarray[Any, Any]
Objective = Callable[[Array], tuple[float, Array]]
"""Coordinates to the loss and its gradient."""
Loss = Callable[[Array], float]

AGREE_WITHIN = 1e-6
PATIENCE, FAR = 100, 5e-4
"""Iterations after which starts are given up, and how many nats above the lowest end they then are."""
MOST_EVEN = 8
"""Coordinates whose directions are a sequence, at most."""


@dataclass(frozen=True)
class Minimum:
    """The lowest point found, and how the descents agreed."""

    coordinates: Array
    value: float
    gradient_norm: float
    starts: int
    starts_agreeing: int
    evaluations: int
    spread: float = 0.0
    """Between the lowest and the highest loss that the starts led to."""
    epochs: int | None = None
    """Iterations that cross-validation chose, for networks."""
    members: tuple[Array, ...] = ()
    """Coordinates of the networks whose mean the fit is; the lowest of them is at `coordinates`."""
    average: float = math.nan
    """Mean of the losses of these."""
    folds: tuple[Array, ...] = ()
    """Coordinates that the cross-validation found for each of its folds, without the fold's unseen rows."""


def descend(
    objective: Objective,
    start: Array,
    limits: Limits | None,
    *,
    iterations: int = 500,
    tolerance: float = 1e-14,
    callback: Callable[..., None] | None = None,
) -> tuple[Array, float, int]:
    """Go down from one start by L-BFGS-B; return coordinates, value and the number of evaluations."""
    if start.size == 0:
        return start, objective(start)[0], 1
    found = minimize(
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
    """Descend from every start, then from random points around the best end, and keep the lowest.

    A start that is still far above the end of another one after many iterations is given up.

    A loss of bounded probabilities has a kink wherever one more sample reaches a bound. Its minima are
    therefore in clusters, which are wider with fewer samples: descents from points at a decreasing distance
    look for the lowest.
    """
    ends: list[tuple[Array, float]] = []
    evaluations = 0
    total = len(starts) + perturbations
    for index, start in enumerate(starts):
        point, near = np.asarray(start, dtype=np.float64), min((one[1] for one in ends), default=math.inf)
        end, value, used = descend(objective, point, limits, tolerance=tolerance, callback=_GivingUp(near))
        ends.append((end, value))
        evaluations += used
        if tick:
            tick((index + 1) / total)
    best, lowest = min(ends, key=lambda pair: pair[1])
    agreeing = sum(value <= lowest + AGREE_WITHIN for _, value in ends)
    if perturbations and best.size:
        low, high = _edges(limits, best.size)
        steps = _steps(perturbations, best.size, seed)
        for index, step in enumerate(steps):
            start = np.clip(best + reach * 0.02 ** (index / perturbations) * step, low, high)
            end, value, used = descend(objective, start, limits, iterations=25)
            evaluations += used
            if value < lowest:
                best, lowest = end, value
            if tick:
                tick((len(starts) + index + 1) / total)
    gradient_norm = projected_gradient(objective, best, limits)
    spread = max(value for _, value in ends) - lowest
    return Minimum(best, lowest, gradient_norm, len(starts), agreeing, evaluations, spread)


class _GivingUp:
    """Ends a descent that is far above the lowest end of others after `PATIENCE` iterations."""

    def __init__(self, lowest: float) -> None:
        self.lowest, self.rounds = lowest, 0

    def __call__(self, intermediate_result: OptimizeResult) -> None:
        self.rounds += 1
        if self.rounds == PATIENCE and intermediate_result.fun > self.lowest + FAR:
            raise StopIteration


def _steps(count: int, size: int, seed: int) -> Array:
    """Return directions (count, size) between -1 and 1, which in few coordinates fill the cube evenly.

    These are multiples of powers of the generalised golden ratio, the root of x^(size + 1) = x + 1 (Roberts
    2018), from a random point on. In many coordinates that is not more even than random numbers.
    """
    random = np.random.default_rng(seed)
    if size > MOST_EVEN:
        return random.uniform(-1.0, 1.0, (count, size))
    ratio = 1.0
    for _ in range(60):
        ratio = (1.0 + ratio) ** (1.0 / (size + 1))
    shares = ratio ** -np.arange(1.0, size + 1)
    steps: Array = 2.0 * ((random.uniform(size=size) + np.outer(np.arange(count), shares)) % 1.0) - 1.0
    return steps


def not_above(
    objective: Objective, minimum: Minimum, points: Iterable[Array], limits: Limits | None
) -> Minimum:
    """Go on from each point that is lower than the minimum."""
    for point in points:
        value = objective(point)[0]
        if value < minimum.value:
            end, reached, _ = descend(objective, point, limits)
            if reached > value:  # a line search that failed far from the point
                end, reached = point, value
            slope = projected_gradient(objective, end, limits)
            minimum = replace(minimum, coordinates=end, value=reached, gradient_norm=slope, starts_agreeing=1)
    return minimum


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
