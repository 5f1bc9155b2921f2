"""The descents of a fit that has several starts: on some of the rows first, on all from the best ends.

The fit of linear maps: cross-validation chooses the strength of the penalty, then one descent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import numpy as np

from boxcal.calibrators.array_ops import log_softmax
from boxcal.calibrators.data import FOLDS, ValidationSet, fold_masks
from boxcal.calibrators.fitting.descent import Minimum, best_of, descend, distinct, not_above
from boxcal.calibrators.fitting.network_validation import WARMED
from boxcal.calibrators.fitting.networks import SCREENED
from boxcal.calibrators.fitting.objective import Objective, objective_of
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.linear import LinearMap
from boxcal.calibrators.maps.parameters import Array
from boxcal.calibrators.threads import block_rows, over_blocks

WORSE = 2
"""The path of strengths ends after so many that are worse than the best."""


class StrengthPath:
    """Fits of a linear map to the rows outside each fold, at every strength of its penalty.

    Each begins at that of the strength before it. The temperature of a fold is that of the rows outside it:
    its own rows have no part in what judges them.

    `masks`: of the folds, each (N,). `tick`: called with the fraction done. `read`: gives the data as a fold
    reads them, where this is not as they are.
    """

    def __init__(
        self,
        logit_map: LinearMap,
        data: ValidationSet,
        masks: Sequence[Array],
        tick: Callable[[float], None],
        read: Callable[[int], ValidationSet] | None = None,
    ) -> None:
        self.strengths, self.masks, self.evaluations = logit_map.strengths, masks, 0
        self._maps = list[LinearMap]()
        self._points = list[list[Array]]()
        self._losses = list[Array]()
        objectives, unseen = list[Objective](), list[Array]()
        for fold, inside in enumerate(masks):
            self._maps.append(copy(logit_map))
            self._maps[-1].parameters = dict(logit_map.parameters)
            seen, rows = _parted(self._maps[-1], data if read is None else read(fold), inside)
            objectives.append(seen)
            unseen.append(rows)
        weights = np.ones(len(data)) if data.weights is None else data.weights
        points, totals = [logit_map.starts()[0]] * len(masks), list[float]()
        for strength in self.strengths:
            losses = np.empty(len(data))
            for fold, one in enumerate(self._maps):
                one.strength = strength
                points[fold], _, count = descend(
                    objectives[fold], points[fold], None, iterations=50, tolerance=1e-6
                )
                self.evaluations += count
                inside = masks[fold]
                losses[inside] = map_losses(one.moved(points[fold]), unseen[fold], data.labels[inside])
            self._points.append(list(points))
            self._losses.append(losses)
            totals.append(float(weights @ losses))
            tick(len(totals) / len(self.strengths))
            if len(totals) - 1 - int(np.argmin(totals)) >= WORSE:
                break
        by_strength = np.stack(self._losses)
        self.best = strongest_of_equals(by_strength, weights)
        """Index of the strength chosen."""
        self.nested = [strongest_of_equals(by_strength, np.where(inside, 0.0, weights)) for inside in masks]
        """Index of the strength that the other folds choose, for each fold."""

    @property
    def nearby(self) -> Array:
        """Coordinates near the optimum for all rows at the best strength."""
        return np.asarray(np.mean(self._points[self.best], axis=0))

    def losses(self) -> Array:
        """Give the loss (N,) of every row, by a fit and a strength that have not seen it."""
        found = np.empty(len(self._losses[0]))
        for inside, index in zip(self.masks, self.nested, strict=True):
            found[inside] = self._losses[index][inside]
        return found

    def maps(self) -> list[LinearMap]:
        """Give the map of each fold, at the strength that the other folds choose."""
        chosen = zip(self._maps, self.nested, range(len(self.masks)), strict=True)
        return [one.moved(self._points[index][fold]) for one, index, fold in chosen]


def _parted(logit_map: LinearMap, data: ValidationSet, inside: Array) -> tuple[Objective, Array]:
    """Give the objective of a map on the rows outside a fold, and the scores of those inside.

    Of the rows outside it keeps what the map computes of them once, and nothing beside: all folds are held at
    a time, and logits may be of a thousand classes.
    """
    used = data.rows(~inside)
    logit_map.prepare(used)
    objective: Any = objective_of(logit_map, None, used.scores, used.labels, used.weights)
    objective.data.scores = objective.precomputed
    return objective, data.rows(inside).scores


def unseen_losses(logit_map: LinearMap, data: ValidationSet, inside: Array) -> Array:
    """Give the losses of the rows of a fold, by a fit without them at the second strength."""
    logit_map.strength = logit_map.strengths[1]
    objective, scores = _parted(logit_map, data, inside)
    point, _, _ = descend(objective, logit_map.starts()[0], None, iterations=50, tolerance=1e-6)
    return map_losses(logit_map.moved(point), scores, data.labels[inside])


def strongest_of_equals(losses: Array, weights: Array) -> int:
    """Choose the first strength whose mean loss is within a standard error of the lowest.

    `losses`: (S, N), of rows not seen, from the strongest penalty on. `weights`: (N,), of the rows.
    The rule is that of Breiman et al. (1984), on paired differences.
    """
    total = weights.sum()
    excess = losses - losses[(losses @ weights).argmin()]
    means = excess @ weights / total
    errors = np.sqrt(((weights * (excess - means[:, None])) ** 2).sum(axis=1)) / total
    return int(np.argmax(means <= errors))


def map_losses(logit_map: LogitMap, source: Array, labels: Array) -> Array:
    """Give the loss (N,) of rows behind a map, without bounds; `source`: what it reads."""

    def work(rows: slice) -> Array:
        log_p = log_softmax(logit_map(source[rows]))
        own: Array = -np.take_along_axis(log_p, labels[rows, None], axis=1)[:, 0]
        return own

    block = block_rows(source.shape[1]) if source.ndim == 2 else len(labels)  # inputs are one batch
    return np.concatenate(list(over_blocks(work, len(labels), block)))


def fit_linear(
    logit_map: LinearMap,
    data: ValidationSet,
    *,
    seed: int,
    thorough: bool,
    tick: Callable[[float], None],
    path: StrengthPath | None = None,
) -> Minimum:
    """Choose the strength by cross-validation, which the map keeps, then descend on all samples.

    `path`: that of these data where the folds have been fitted already.
    """
    start = near = logit_map.starts()[0]
    # Where no predicted label is wrong, weaker penalties are always better: the strongest stays.
    if path is None and len(logit_map.strengths) > 1 and len(data) >= 2 * FOLDS and data.shows_errors:
        path = StrengthPath(logit_map, data, fold_masks(data, FOLDS, seed), lambda done: tick(0.8 * done))
    if path is not None:
        logit_map.strength, near = path.strengths[path.best], path.nearby
    objective = objective_of(logit_map, None, data.scores, data.labels, data.weights)
    if objective(near)[0] < objective(start)[0]:
        start = near
    iterations, tolerance = (2000, 1e-15) if thorough else (300, 1e-9)
    point, value, count = descend(objective, start, None, iterations=iterations, tolerance=tolerance)
    norm = float(np.abs(objective(point)[1]).max())
    return Minimum(point, value, norm, 1, 1, count + (path.evaluations if path else 0))


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
