"""The descents that every fit is made of: bounded quasi-Newton from many starts, and hops around the best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import minimize
from scipy.stats import qmc

Array = np.ndarray[Any, Any]
Objective = Callable[[Array], tuple[float, Array]]
"""Coordinates to the loss and its gradient."""
Limits = Sequence[tuple[float | None, float | None]] | None

AGREE_WITHIN = 1e-6


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
    objective: Objective, start: Array, limits: Limits, *, iterations: int = 500
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
        options={"maxiter": iterations, "maxfun": 2 * iterations, "maxcor": 20, "ftol": 1e-14, "gtol": 1e-9},
    )
    return np.asarray(found.x), float(found.fun), int(found.nfev)


def projected_gradient(objective: Objective, coordinates: Array, limits: Limits) -> float:
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
    limits: Limits = None,
    *,
    hops: int = 0,
    seed: int = 0,
    tick: Callable[[float], None] | None = None,
) -> Minimum:
    """Descend from every start, then from points hopped to around the best, and keep the lowest.

    A loss of bounded probabilities is smooth between kinks, and kinks point upwards, where one more sample
    comes to sit at a bound. So minima come in clusters, the wider the fewer the samples: hops of shrinking
    radius look for the lowest of the cluster.
    """
    ends: list[tuple[Array, float]] = []
    evaluations = 0
    total = len(starts) + hops
    for index, start in enumerate(starts):
        end, value, used = descend(objective, np.asarray(start, dtype=np.float64), limits)
        ends.append((end, value))
        evaluations += used
        if tick:
            tick((index + 1) / total)
    best, lowest = min(ends, key=lambda pair: pair[1])
    agreeing = sum(value <= lowest + AGREE_WITHIN for _, value in ends)
    if hops and best.size:
        steps = qmc.Halton(best.size, seed=seed).random(hops) * 2.0 - 1.0
        for index, step in enumerate(steps):
            radius = 0.5 * 0.04 ** (index / hops)
            start = best + radius * step
            for i, (low, high) in enumerate(limits or ()):
                start[i] = np.clip(start[i], low, high)
            end, value, used = descend(objective, start, limits, iterations=50)
            evaluations += used
            if value < lowest:
                best, lowest = end, value
            if tick:
                tick((len(starts) + index + 1) / total)
    return Minimum(
        best, lowest, projected_gradient(objective, best, limits), len(starts), agreeing, evaluations
    )
