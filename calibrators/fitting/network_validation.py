"""Cross-validation of networks: which start, how many iterations, and how far from constant answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from boxcal.calibrators.fitting.descent import Array, Loss, descend
from boxcal.calibrators.fitting.objective import Objective
from boxcal.calibrators.maps.base import BoxMap, LogitMap
from boxcal.calibrators.maps.parameters import Limits

WARMED = 2000
"""Rows on which descents begin."""
EPOCHS, PATIENCE = 200, 12
"""Iterations of a network's descent at most, and without a lower held-out loss."""
HELD = 30
"""Iterations in which the coordinates that a start holds stay as they are."""
SCREENING, FINALISTS, MANY = 2, 3, 2000
"""Folds on which all places are compared; how many places are compared on all folds; and held-out rows above
which the best place alone goes on: what two folds of so many cannot tell apart has nearly the same loss."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the way from the plain answer to that of the networks, which cross-validation chooses between."""
MOST_COORDINATES = 1000
"""Of maps whose networks may go a share of the way: the paths of larger ones take too much memory."""


class DescentRows(NamedTuple):
    """The loss of a descent, on all of its rows and on a few."""

    all: Objective
    few: Objective

    @classmethod
    def of(cls, objective: Objective, index: Array) -> DescentRows:
        """Take the rows with these indices, which are in random order."""
        return cls(objective.rows(index), objective.rows(index[:WARMED]))

    def with_maps(self, maps: tuple[LogitMap, BoxMap | None]) -> DescentRows:
        """Give the losses of maps whose networks read something else."""
        return DescentRows(self.all.with_maps(*maps), self.few.with_maps(*maps))


class HeldOutFold(NamedTuple):
    """One part of the cross-validation: the rows used, and those that judge."""

    used: DescentRows
    unseen: Objective


class NetworkStart(NamedTuple):
    """Where the descents of several networks may begin; their mean is the fit."""

    exact: Objective  # The loss of every row
    rows: DescentRows  # The same, in random order
    folds: Sequence[HeldOutFold]
    points: Sequence[Array]  # Coordinates, one vector for each network
    # Coordinates where each fold's descent begins. Its unseen rows had no part in them.
    fold_points: Sequence[Array]
    # How many of the first coordinates stay as they are in the first `HELD` iterations, which take a few
    # rows, and which no cross-validation stops
    held: int = 0
    # Nats by which its cross-validated loss must be lower than that of others to be chosen
    handicap: float = 0.0

    def approached(self, point: Array, rows: DescentRows, limits: Limits | None) -> tuple[Array, int]:
        """Descend without the coordinates that are held; return coordinates and the number of evaluations."""
        if not self.held:
            return point, 0

        objective = rows.few.with_pseudo_sample()

        def without(coordinates: Array) -> tuple[float, Array]:
            value, gradient = objective(coordinates)
            return value, np.where(np.arange(len(gradient)) < self.held, 0.0, gradient)

        end, _, calls = descend(without, point, limits, iterations=HELD, tolerance=1e-9)
        return end, calls


class Choice(NamedTuple):
    """What cross-validation chose."""

    start: int  # Index of the start
    epochs: int
    share: float  # Of the way from the plain answer that networks go
    folds: Sequence[Array] = ()  # Coordinates of each fold's network there; none if these are too many


def cross_validated(
    starts: Sequence[NetworkStart],
    plain: Sequence[Array],
    limits: Limits | None,
    tick: Callable[[float], None],
) -> tuple[Choice, int]:
    """Choose a start, and give the number of evaluations that this took.

    Each fold of the cross-validation is that of another network. All starts are compared on `SCREENING`
    folds, and the best `FINALISTS` of them on the others too, or the best one if there are many samples. What
    is best must be better than the plain answers, of which there is one for each fold; otherwise these are
    chosen, without iterations.
    """
    folds = range(len(starts[0].folds))
    if not folds:  # too few samples
        return Choice(0, 0, 0.0), 0
    evaluations, curves = 0, np.zeros((len(starts), len(folds), EPOCHS + 1))
    paths: dict[tuple[int, int], list[Array]] = {}
    sizes = np.array([len(fold.unseen.data) for fold in starts[0].folds])
    compared, done = list(range(len(starts))), 0
    finalists = 1 if sizes.sum() > MANY else min(FINALISTS, len(starts))
    descents = len(starts) * SCREENING + finalists * len(folds[SCREENING:])
    for some in (folds[:SCREENING], folds[SCREENING:]):
        for index in compared:
            for fold in some:
                curves[index, fold], paths[index, fold], calls = _held_out_curve(starts[index], fold, limits)
                evaluations, done = evaluations + calls, done + 1
                tick(min(1.0, done / descents))
        means = np.einsum("sfe,f->se", curves, sizes) / sizes[: some.stop].sum()
        lowest = means.min(axis=1) + [start.handicap for start in starts]
        compared = sorted(compared, key=lambda index: float(lowest[index]))[:finalists]
    best = compared[0]
    epochs = int(np.argmin(means[best]))
    losses, share, ends = curves[best, :, epochs], 1.0, []
    # The lowest of many means is too low, by about how far the folds are above their own lowest loss there
    # (Tibshirani and Tibshirani 2009).
    bias = (losses - curves[best].min(axis=1)).mean()
    if len(plain[0]) <= MOST_COORDINATES:
        ends = [path[min(epochs, len(path) - 1)] for path in (paths[best, fold] for fold in folds)]
        share, losses, ends = _best_share(starts[best], plain, ends, sizes)
    plain_losses = [fold.unseen.value(own) for fold, own in zip(starts[0].folds, plain, strict=True)]
    if not _is_better(losses + bias, plain_losses):
        return Choice(0, 0, 0.0, plain), evaluations
    return Choice(best, epochs, share, ends), evaluations


def _best_share(
    start: NetworkStart, plain: Sequence[Array], ends: Sequence[Array], sizes: Array
) -> tuple[float, Array, list[Array]]:
    """Choose how far networks go from the plain answers; give the held-out loss and network of each fold.

    What was fitted to a few samples predicts better when it is shrunk (Copas 1983).
    """
    each = [fold.unseen for fold in start.folds]
    paths = list(zip(each, plain, ends, strict=True))
    points = [[unseen.between(begin, end, share) for unseen, begin, end in paths] for share in SHARES]
    losses = np.array(
        [[unseen.value(own) for unseen, own in zip(each, some, strict=True)] for some in points]
    )
    at = int(np.argmin(losses @ sizes))
    return SHARES[at], losses[at], points[at]


def _is_better(losses: Array, plain: Sequence[float]) -> bool:
    """Whether the held-out losses of some folds are lower than others by a standard error of their mean.

    This is the rule of one standard error (Breiman et al. 1984, section 3.4.3): what cross-validation of a
    few samples prefers by less than that is often worse.
    """
    gains = np.asarray(plain) - losses
    if len(gains) < 2:
        return bool((gains > 0.0).all())
    return bool(gains.mean() > gains.std(ddof=1) / math.sqrt(len(gains)))


def _held_out_curve(start: NetworkStart, fold: int, limits: Limits | None) -> tuple[Array, list[Array], int]:
    """Give the held-out loss after 0 to `EPOCHS` iterations of a descent, its path, and the evaluations."""
    used, unseen = start.folds[fold]
    point, before = start.approached(start.fold_points[fold], used, limits)
    watch = _Watch(unseen.value, point)
    objective = used.all.with_pseudo_sample()
    _, _, calls = descend(objective, point, limits, iterations=EPOCHS, tolerance=1e-9, callback=watch)
    curve = np.array(watch.values)
    return np.pad(curve, (0, EPOCHS + 1 - len(curve)), mode="edge"), watch.path, before + calls + len(curve)


class _Watch:
    """Records the held-out loss of every iteration, and stops a descent once it no longer decreases."""

    def __init__(self, held_out: Loss, start: Array) -> None:
        self.held_out, self.values, self.path = held_out, [held_out(start)], [start]

    def __call__(self, coordinates: Array) -> None:
        self.values.append(self.held_out(coordinates))
        if len(coordinates) <= MOST_COORDINATES:
            self.path.append(np.array(coordinates))
        if len(self.values) - 1 - int(np.argmin(self.values)) >= PATIENCE or len(self.values) > EPOCHS:
            raise StopIteration
