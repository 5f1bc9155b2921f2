"""Fits of networks: from where they start, what they read, and the mean of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from boxcal.calibrators.data import FOLDS, ValidationSet, fold_masks
from boxcal.calibrators.fitting.descent import AGREE_WITHIN, Array, Minimum, descend, projected_gradient
from boxcal.calibrators.fitting.fitted_method import Fitted, Maps
from boxcal.calibrators.fitting.network_validation import (
    SCREENING,
    DescentRows,
    HeldOutFold,
    NetworkStart,
    cross_validated,
)
from boxcal.calibrators.fitting.objective import Objective
from boxcal.calibrators.maps.base import BoxMap, LogitMap
from boxcal.calibrators.maps.network_box import InstanceDependentBounds
from boxcal.calibrators.maps.parameters import Limits
from boxcal.calibrators.maps.temperature import TemperatureScaling

SCREENED = 1000
"""Rows on which the starts of a map that has many are compared."""
MOST_PLACES = 4
"""Places from which networks descend."""
HANDICAP = 1e-3
"""Nats by which networks that read something else than the log-softmax must be better to be chosen."""
COMPARING = 0.8
"""Share of the descents that the cross-validation takes, about, for the progress."""


class Place(NamedTuple):
    """Where several networks start."""

    maps: Maps  # Whose networks they are
    points: Sequence[Array]  # Coordinates of both maps, for each network
    folds: Sequence[Array]  # The same, for the network of each fold of the cross-validation
    held: int = 0  # How many of the first coordinates stay as they are at first

    @classmethod
    def beside(
        cls,
        maps: Maps,
        bases: Sequence[Array],
        folds: Sequence[Array],
        lasts: Sequence[Array],
        held: int = 0,
    ) -> Place:
        """Put coordinates of the first map, of networks and of folds, beside those of the second."""
        return cls(maps, combined(bases, lasts), combined(folds, lasts), held)


def combined(firsts: Sequence[Array], lasts: Sequence[Array]) -> list[Array]:
    """Join coordinates of the first map to those of the second; the shorter list is repeated."""
    count = max(len(firsts), len(lasts))
    return [
        np.concatenate(pair) for pair in zip(repeated(firsts, count), repeated(lasts, count), strict=True)
    ]


def repeated(points: Sequence[Array], count: int) -> list[Array]:
    """Give as many points, from the first again after the last."""
    return [points[at % len(points)] for at in range(count)]


def around(
    maps: tuple[LogitMap, InstanceDependentBounds],
    alone: Fitted,
    other: Fitted | None,
    constant: Fitted,
    mapped: Array,
) -> list[Place]:
    """Give the places from which the networks of a box descend.

    Where the best constant box is vacuous, descents that are free to change the temperature of `ts` end there
    before the networks tell one row from another. Others begin sharper, and hold that temperature. `pts`
    with a box begins at its own networks and at those of `ts` with a box, for together they seldom find what
    those of the box find alone.

    `mapped`: (N, K) logits that `alone` maps to.
    """
    logit_map, box = maps
    near, middle = box.starts_at(constant.bound_map.coordinates())
    bases, folds, held = alone.members, alone.folds, 0
    first = Place.beside(maps, bases, folds, near)
    if logit_map.normalises:
        boxes: Sequence[BoxMap] = [box]
    elif other and other.has_networks:
        boxes = [box.reading_as(other.bound_map)]
        if logit_map.is_network:
            members, unseen = (_constant_base(logit_map, some) for some in (other.members, other.folds))
            return [first, Place((logit_map, boxes[0]), members, unseen)]
    else:
        boxes = box.variants(mapped)
    if isinstance(logit_map, TemperatureScaling):
        bases = folds = list(logit_map.starts()[:1])
        held = logit_map.size
    return [first, *(Place.beside((logit_map, one), bases, folds, middle, held) for one in boxes)]


def _constant_base(logit_map: LogitMap, points: Sequence[Array]) -> list[Array]:
    """Replace the log temperature, which comes first, by a network that answers it in all rows."""
    starts = [logit_map.tempered(float(point[0])) for point in points]
    return [np.concatenate([some[at % len(some)], points[at][1:]]) for at, some in enumerate(starts)]


def mean_of_networks(
    objective: Objective,
    places: Sequence[Place],
    data: ValidationSet,
    order: Array,
    seed: int,
    *,
    plain: Place | None = None,
    thorough: bool,
    tick: Callable[[float], None],
) -> Fitted:
    """Fit the networks of the best place, and answer their mean.

    The first place's maps are the preferred ones. Where the mean is worse than the networks on average, they
    are not alike, and the answer is the lowest of them.

    `order`: (N,) int64: a random order of the rows. `plain`: where networks of the first place's maps answer
    the best constants: the first place unless given. The networks must be better. `tick`: called with the
    fraction done.
    """
    if len(places) > MOST_PLACES:
        some = objective.rows(order[:SCREENED])
        places = sorted(places, key=lambda place: some(place.points[0])[0])[:MOST_PLACES]
    networks = max(len(place.points) for place in places) if thorough else SCREENING
    masks = fold_masks(data, FOLDS, seed)[: None if thorough else SCREENING]
    every = DescentRows.of(objective, order)
    folds = [
        HeldOutFold(DescentRows.of(objective, order[~unseen[order]]), objective.rows(unseen))
        for unseen in masks
    ]
    starts = []
    for place in places:
        maps = place.maps[0], place.maps[1] if objective.bound_map else None
        own = [HeldOutFold(used.with_maps(maps), unseen.with_maps(*maps)) for used, unseen in folds]
        points, unseen = list(place.points[:networks]), repeated(place.folds, len(folds))
        handicap = 0.0 if place.maps == places[0].maps else HANDICAP
        exact = objective.with_maps(*maps)
        starts.append(NetworkStart(exact, every.with_maps(maps), own, points, unseen, place.held, handicap))
    plain = plain or places[0]
    fold_plain = repeated(plain.folds, len(folds))
    best, minimum = best_epochs(starts, plain.points[0], fold_plain, objective.limits, tick)
    first, last = places[best].maps
    lowest = Fitted.at((first, last), minimum.coordinates, minimum).valued(data)
    lowest = replace(lowest, minimum=replace(lowest.minimum, folds=minimum.folds))
    if len(minimum.members) == 1:
        return lowest
    members = Fitted(first, last, minimum).members
    if objective.bound_map:
        last = last.averaged([member[first.size :] for member in members])
    first = first.averaged([member[: first.size] for member in members])
    mean = Fitted(first, last, minimum).valued(data)
    return mean if mean.minimum.value <= minimum.average else lowest


def best_epochs(
    starts: Sequence[NetworkStart],
    plain: Array,
    fold_plain: Sequence[Array],
    limits: Limits | None,
    tick: Callable[[float], None],
) -> tuple[int, Minimum]:
    """Descend with the networks of the best start, for as many iterations as cross-validation finds best.

    Returns also which start is best.
    """
    choice, evaluations = cross_validated(starts, fold_plain, limits, lambda done: tick(COMPARING * done))
    best, epochs, share, folds = choice
    exact, rows, ends = starts[best].exact, starts[best].rows, []
    for own in starts[best].points:
        point, calls = starts[best].approached(own, rows, limits)
        more = 0
        if epochs:
            objective = rows.all.with_pseudo_sample()
            point, _, more = descend(objective, point, limits, iterations=epochs, tolerance=1e-9)
        point = rows.all.between(plain, point, share)
        ends.append((exact.value(point), point))
        evaluations += calls + more + 1
        tick(COMPARING + (1.0 - COMPARING) * len(ends) / len(starts[best].points))
    ends.sort(key=lambda end: end[0])
    values = np.array([value for value, _ in ends])
    return best, Minimum(
        coordinates=ends[0][1],
        value=ends[0][0],
        gradient_norm=projected_gradient(exact, ends[0][1], limits),
        starts=len(ends),
        starts_agreeing=int((values <= values[0] + AGREE_WITHIN).sum()),
        evaluations=evaluations,
        spread=float(np.ptp(values)),
        epochs=epochs,
        members=tuple(point for _, point in ends),
        average=float(values.mean()),
        folds=tuple(folds),
    )
