"""The descents of a fit that has several starts: on some of the rows first, on all from the best ends.

The fit of linear maps: cross-validation chooses the strength of the penalty, then one descent.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy

import numpy as np

from boxcal.calibrators.data import FOLDS, ValidationSet, fold_masks
from boxcal.calibrators.fitting.descent import Minimum, best_of, descend, distinct, not_above
from boxcal.calibrators.fitting.network_validation import WARMED
from boxcal.calibrators.fitting.networks import SCREENED
from boxcal.calibrators.fitting.objective import Objective, objective_of
from boxcal.calibrators.maps.linear import LinearMap
from boxcal.calibrators.maps.parameters import Array

WORSE = 2
"""The path of strengths ends after so many that are worse than the best."""


def fit_linear(
    logit_map: LinearMap, data: ValidationSet, *, seed: int, thorough: bool, tick: Callable[[float], None]
) -> Minimum:
    """Choose the strength by cross-validation, which the map keeps, then descend on all samples."""
    start = near = logit_map.starts()[0]
    evaluations = 0

    def loss(part: ValidationSet) -> Objective:
        own = copy(logit_map)
        own.samples = part.effective
        return objective_of(own, None, part.scores, part.labels, part.weights)

    if len(logit_map.strengths) > 1 and len(data) >= 2 * FOLDS:
        masks = fold_masks(data, FOLDS, seed)
        sides = [(loss(data.rows(~inside)), loss(data.rows(inside))) for inside in masks]
        weights = np.ones(len(data)) if data.weights is None else data.weights
        shares = [float(weights[inside].sum()) for inside in masks]
        points, means, paths = [start] * len(masks), list[float](), list[Array]()
        for strength in logit_map.strengths:
            total = 0.0
            for fold, (used, unseen) in enumerate(sides):
                for one in (used, unseen):
                    one.logit_map.adopt(_with(logit_map, strength))
                points[fold], _, count = descend(used, points[fold], None, iterations=50, tolerance=1e-6)
                evaluations += count
                total += unseen.mean_nll(points[fold]) * shares[fold]
            means.append(total / len(data))
            paths.append(np.mean(points, axis=0))
            tick(0.8 * len(means) / len(logit_map.strengths))
            if len(means) - 1 - int(np.argmin(means)) >= WORSE:
                break
        best = int(np.argmin(means))
        logit_map.strength, near = logit_map.strengths[best], paths[best]
    objective = loss(data)
    if objective(near)[0] < objective(start)[0]:
        start = near
    iterations, tolerance = (2000, 1e-15) if thorough else (300, 1e-9)
    point, value, count = descend(objective, start, None, iterations=iterations, tolerance=tolerance)
    norm = float(np.abs(objective(point)[1]).max())
    return Minimum(point, value, norm, 1, 1, evaluations + count)


def _with(logit_map: LinearMap, strength: float) -> LinearMap:
    other = copy(logit_map)
    other.strength = strength
    return other


WARM_DISTANT, BEHIND = 0.1, 0.01
"""Large sets, where descents begin on some of the rows: how far apart the ends are that go on to all rows,
and how many nats behind the best they may be."""


def lowest_minimum(
    objective: Objective,
    starts: list[Array],
    kept: list[Array],
    order: Array,
    *,
    perturbations: int,
    thorough: bool,
    seed: int,
    tick: Callable[[float], None],
) -> Minimum:
    """Descend from the starts; the answer is not above the points kept, optima of methods contained.

    `order`: (N,) int64: a random order of the rows. `tick`: called with the fraction done.
    """
    limits, starts_kept = objective.limits, objective.logit_map.starts_kept
    points = starts
    if len(starts) > starts_kept:
        some = objective.rows(order[:SCREENED])
        points = sorted(starts, key=lambda point: some(point)[0])[:starts_kept]
    if len(points) > 1 and len(order) > 2 * WARMED:
        some = objective.rows(order[:WARMED])
        ends = [descend(some, point, limits, tolerance=1e-10) for point in points]
        ends.sort(key=lambda end: end[1])
        close = [point for point, value, _ in ends if value <= ends[0][1] + BEHIND]
        points = distinct(close, WARM_DISTANT, starts_kept)
    if not thorough:
        points, perturbations = points[: len(points) // 2 + 1], 0
    minimum = best_of(
        objective,
        points,
        limits,
        perturbations=perturbations,
        tolerance=1e-14 if thorough else 1e-9,
        seed=seed,
        tick=tick,
    )
    return not_above(objective, minimum, kept, limits)
