"""The descents of a fit that has several starts: on some of the rows first, on all from the best ends."""

from __future__ import annotations

from collections.abc import Callable

from boxcal.calibrators.fitting.descent import Minimum, best_of, descend, distinct, not_above
from boxcal.calibrators.fitting.network_validation import WARMED
from boxcal.calibrators.fitting.networks import SCREENED
from boxcal.calibrators.fitting.objective import Objective
from boxcal.calibrators.maps.parameters import Array

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

    Parameters
    ----------
    objective : Objective
        On all rows.
    starts, kept : list of ndarray
        Coordinates. Of many starts, those are followed that are lowest on some of the rows.
    order : ndarray
        (N,) int64: a random order of the rows.
    perturbations : int
        Descents around the best end.
    thorough : bool
        Otherwise fewer starts are followed, without perturbations.
    seed : int
        Of the perturbations.
    tick : callable
        Called with the fraction done.
    """
    limits, followed = objective.limits, objective.logit_map.followed
    points = starts
    if len(starts) > followed:
        some = objective.rows(order[:SCREENED])
        points = sorted(starts, key=lambda point: some(point)[0])[:followed]
    if len(points) > 1 and len(order) > 2 * WARMED:
        some = objective.rows(order[:WARMED])
        ends = [descend(some, point, limits, tolerance=1e-10) for point in points]
        ends.sort(key=lambda end: end[1])
        close = [point for point, value, _ in ends if value <= ends[0][1] + BEHIND]
        points = distinct(close, WARM_DISTANT, followed)
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
