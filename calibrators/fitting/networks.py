"""Fits of networks: from where they start, what they read, how far they go, and the mean of several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.fitting.descent import (
    AGREE_WITHIN,
    Array,
    Loss,
    Minimum,
    descend,
    projected_gradient,
)
from boxcal.calibrators.fitting.fitted import Fitted, Maps
from boxcal.calibrators.fitting.joint import JointObjective
from boxcal.calibrators.folds import fold_masks
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.logit_maps.temperature import TemperatureScaling
from boxcal.calibrators.parametrised import Limits

SCREENED = 1000
"""Rows on which the starts of a map that has many are compared."""
WARMED = 2000
"""Rows on which descents begin."""
MOST_PLACES = 4
"""Places from which networks descend."""
FOLDS = 5
"""Of the cross-validation that stops the fit of networks."""
HANDICAP = 1e-3
"""Nats by which networks that read something else than the log-softmax must be better to be chosen."""
EPOCHS, PATIENCE = 200, 12
"""Iterations of a network's descent at most, and without a lower held-out loss."""
HELD = 30
"""Iterations in which the coordinates that a start holds stay as they are."""
COMPARING = 0.8
"""Share of the descents that the cross-validation takes, about, for the progress."""
SCREENING, FINALISTS = 2, 3
"""Folds on which all places are compared, and how many places are compared on all folds."""
SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the way from the plain answer to that of the networks, which cross-validation chooses between."""
MOST_COORDINATES = 1000
"""Of maps whose networks may go a share of the way: the paths of larger ones take too much memory."""


class Place(NamedTuple):
    """Where several networks start.

    Attributes
    ----------
    maps
        Whose networks they are.
    points
        Coordinates of both maps, for each network.
    held
        How many of the first coordinates stay as they are at first.
    """

    maps: Maps
    points: Sequence[Tensor]
    held: int = 0


def combined(firsts: Sequence[Tensor], lasts: Sequence[Tensor]) -> list[Tensor]:
    """Join coordinates of the first map to those of the second; the shorter list is repeated."""
    count = max(len(firsts), len(lasts))
    return [torch.cat([firsts[at % len(firsts)], lasts[at % len(lasts)]]) for at in range(count)]


def around(
    logit_map: LogitMap, box: BoundMap, bases: Sequence[Tensor], constant: Fitted, mapped: Tensor
) -> list[Place]:
    """Give the places from which the networks of a box descend, for mapped logits (N, K).

    Where the best constant box is vacuous, descents that are free to change the temperature of `ts` end there
    before the networks tell one row from another. Others begin sharper, and hold that temperature.
    """
    near, middle = box.starts_at(torch.from_numpy(constant.bound_map.coordinates()))
    others, held = bases, 0
    if isinstance(logit_map, TemperatureScaling):
        others, held = logit_map.starts()[:1], logit_map.size
    boxes = [box] if logit_map.normalises else box.variants(mapped)
    return [
        Place((logit_map, box), combined(bases, near)),
        *(Place((logit_map, one), combined(others, middle), held) for one in boxes),
    ]


class Rows(NamedTuple):
    """The loss of a descent, on all of its rows and on a few."""

    all: JointObjective
    few: JointObjective

    @classmethod
    def of(cls, objective: JointObjective, index: Tensor) -> Rows:
        """Take the rows with these indices, which are in random order."""
        return cls(objective.rows(index), objective.rows(index[:WARMED]))

    def with_maps(self, maps: tuple[LogitMap, BoundMap | None]) -> Rows:
        """Give the losses of maps whose networks read something else."""
        return Rows(self.all.with_maps(*maps), self.few.with_maps(*maps))


class Fold(NamedTuple):
    """One part of the cross-validation: the rows used, and those that judge."""

    used: Rows
    unseen: JointObjective


class NetworkStart(NamedTuple):
    """Where the descents of several networks may begin; their mean is the fit.

    Attributes
    ----------
    rows
        Every row.
    folds
        Of the cross-validation.
    points
        Coordinates, one vector for each network.
    held
        How many of the first coordinates stay as they are in the first `HELD` iterations, which take a few
        rows, and which no cross-validation stops.
    handicap
        Nats by which its cross-validated loss must be lower than that of others to be chosen.
    """

    rows: Rows
    folds: Sequence[Fold]
    points: Sequence[Array]
    held: int = 0
    handicap: float = 0.0

    def approached(self, index: int, rows: Rows, limits: Limits | None) -> tuple[Array, int]:
        """Descend without the coordinates that are held; return coordinates and the number of evaluations."""
        point = self.points[index % len(self.points)]
        if not self.held:
            return point, 0

        objective = rows.few.with_pseudo_sample()

        def without(coordinates: Array) -> tuple[float, Array]:
            value, gradient = objective(coordinates)
            return value, np.where(np.arange(len(gradient)) < self.held, 0.0, gradient)

        end, _, calls = descend(without, point, limits, iterations=HELD, tolerance=1e-9)
        return end, calls


def mean_of_networks(
    objective: JointObjective,
    places: Sequence[Place],
    data: ValidationSet,
    order: Tensor,
    seed: int,
    *,
    plain: Tensor | None = None,
    thorough: bool,
    tick: Callable[[float], None],
) -> Fitted:
    """Fit the networks of the best place, and answer their mean.

    The first place's maps are the preferred ones. Where the mean is worse than the networks on average, they
    are not alike, and the answer is the lowest of them.

    Parameters
    ----------
    objective : JointObjective
        On all rows.
    places : sequence of Place
    data : ValidationSet
    order : Tensor
        (N,) int64: a random order of the rows.
    seed : int
        Of the folds.
    plain : Tensor, optional
        Coordinates of the first place's maps, with the best constant answers of the networks: of the first
        start unless given. The networks must be better.
    thorough : bool
        Otherwise fewer networks and folds are used, which is enough to compare methods by.
    tick : callable
        Called with the fraction done.
    """
    if len(places) > MOST_PLACES:
        some = objective.rows(order[:SCREENED])
        places = sorted(places, key=lambda place: some(place.points[0].numpy())[0])[:MOST_PLACES]
    networks = max(len(place.points) for place in places) if thorough else SCREENING
    masks = fold_masks(data, FOLDS, seed)[: None if thorough else SCREENING]
    rough = objective.rough()
    every = Rows.of(rough, order)
    folds = [Fold(Rows.of(rough, order[~unseen[order]]), rough.rows(unseen)) for unseen in masks]
    starts = []
    for place in places:
        maps = place.maps[0], place.maps[1] if objective.bound_map else None
        own = [Fold(used.with_maps(maps), unseen.with_maps(*maps)) for used, unseen in folds]
        points = [point.numpy() for point in place.points[:networks]]
        handicap = 0.0 if place.maps == places[0].maps else HANDICAP
        starts.append(NetworkStart(every.with_maps(maps), own, points, place.held, handicap))
    base = places[0].points[0] if plain is None else plain
    best, minimum = best_epochs(starts, base.numpy(), objective.limits, tick)
    first, last = places[best].maps
    lowest = Fitted.at((first, last), torch.from_numpy(minimum.coordinates), minimum).valued(data)
    if len(minimum.members) == 1:
        return lowest
    members = Fitted(first, last, minimum).members
    if objective.bound_map:
        last = last.averaged([member[first.size :] for member in members])
    first = first.averaged([member[: first.size] for member in members])
    mean = Fitted(first, last, minimum).valued(data)
    return mean if mean.minimum.value <= minimum.average else lowest


class Choice(NamedTuple):
    """What cross-validation chose: the start, its iterations, and the share of the way that networks go."""

    start: int
    epochs: int
    share: float


def best_epochs(
    starts: Sequence[NetworkStart],
    plain: Array,
    limits: Limits | None,
    tick: Callable[[float], None],
) -> tuple[int, Minimum]:
    """Descend with the networks of the best start, for as many iterations as cross-validation finds best.

    Returns also which start is best.
    """
    choice, evaluations = _cross_validated(starts, plain, limits, lambda done: tick(COMPARING * done))
    best, epochs, share = choice
    rows, ends = starts[best].rows, []
    for index in range(len(starts[best].points)):
        point, calls = starts[best].approached(index, rows, limits)
        more = 0
        if epochs:
            objective = rows.all.with_pseudo_sample()
            point, _, more = descend(objective, point, limits, iterations=epochs, tolerance=1e-9)
        point = rows.all.between(plain, point, share)
        ends.append((rows.all.value(point), point))
        evaluations += calls + more + 1
        tick(COMPARING + (1.0 - COMPARING) * len(ends) / len(starts[best].points))
    ends.sort(key=lambda end: end[0])
    values = np.array([value for value, _ in ends])
    return best, Minimum(
        coordinates=ends[0][1],
        value=ends[0][0],
        gradient_norm=projected_gradient(rows.all, ends[0][1], limits),
        starts=len(ends),
        starts_agreeing=int((values <= values[0] + AGREE_WITHIN).sum()),
        evaluations=evaluations,
        spread=float(np.ptp(values)),
        epochs=epochs,
        members=tuple(point for _, point in ends),
        average=float(values.mean()),
    )


def _cross_validated(
    starts: Sequence[NetworkStart], plain: Array, limits: Limits | None, tick: Callable[[float], None]
) -> tuple[Choice, int]:
    """Choose a start, and give the number of evaluations that this took.

    Each fold of the cross-validation is that of another network. All starts are compared on `SCREENING`
    folds, and the best `FINALISTS` of them on the others too. What is best must be better than the plain
    answers; otherwise these are chosen, without iterations.
    """
    folds = range(len(starts[0].folds))
    if not folds:  # too few samples
        return Choice(0, 0, 0.0), 0
    evaluations, curves = 0, np.zeros((len(starts), len(folds), EPOCHS + 1))
    paths: dict[tuple[int, int], list[Array]] = {}
    sizes = np.array([len(fold.unseen.labels) for fold in starts[0].folds])
    compared, done = list(range(len(starts))), 0
    descents = len(starts) * SCREENING + FINALISTS * len(folds[SCREENING:])
    for some in (folds[:SCREENING], folds[SCREENING:]):
        for index in compared:
            for fold in some:
                curves[index, fold], paths[index, fold], calls = _held_out_curve(starts[index], fold, limits)
                evaluations, done = evaluations + calls, done + 1
                tick(min(1.0, done / descents))
        means = np.einsum("sfe,f->se", curves, sizes) / sizes[: some.stop].sum()
        lowest = means.min(axis=1) + [start.handicap for start in starts]
        compared = sorted(compared, key=lambda index: float(lowest[index]))[:FINALISTS]
    best = compared[0]
    epochs = int(np.argmin(means[best]))
    losses, share = curves[best, :, epochs], 1.0
    # The lowest of many means is too low, by about how far the folds are above their own lowest loss there
    # (Tibshirani and Tibshirani 2009).
    bias = (losses - curves[best].min(axis=1)).mean()
    if len(plain) <= MOST_COORDINATES:
        ends = [path[min(epochs, len(path) - 1)] for path in (paths[best, fold] for fold in folds)]
        share, losses = _best_share(starts[best], plain, ends, sizes)
    if not _is_better(losses + bias, [fold.unseen.value(plain) for fold in starts[0].folds]):
        return Choice(0, 0, 0.0), evaluations
    return Choice(best, epochs, share), evaluations


def _best_share(
    start: NetworkStart, plain: Array, ends: Sequence[Array], sizes: Array
) -> tuple[float, Array]:
    """Choose how far networks go from the plain answers, and give the held-out loss of each fold there.

    What was fitted to a few samples predicts better when it is shrunk (Copas 1983).
    """
    losses = np.array(
        [
            [
                fold.unseen.value(fold.unseen.between(plain, end, share))
                for fold, end in zip(start.folds, ends, strict=True)
            ]
            for share in SHARES
        ]
    )
    at = int(np.argmin(losses @ sizes))
    return SHARES[at], losses[at]


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
    point, before = start.approached(fold, used, limits)
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
