"""The fit of `pb`, `pb-lower` and `pb-upper`: each row is sorted once, then any box costs O(N log K).

The search runs in `log(lower K)` and `log(slack)` of `ConstantBounds`, where no plateau is dead and the
optimum is well scaled for any K.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from boxcal.calibrators.fitting.descent import Minimum, best_of, descend, distinct, local_minima
from boxcal.calibrators.maps.constant_box import NARROWEST, WIDEST
from boxcal.calibrators.maps.parameters import Limits
from boxcal.calibrators.operator.uniform import SortedRows

Array = np.ndarray[Any, Any]
Sides = Literal["both", "lower", "upper"]

FAINT = math.log(1e-5)
SAMPLES = 1000, 4000
"""Rows that the grid looks at, and rows that the first descents look at."""
DISTANT = 2.0
FOLLOWED = 3
"""How many of the starts are followed on all rows."""
AXIS, LOCAL_MINIMA = 48, 3
"""Points evaluated along each axis through the best point, and descents from the minima there."""
SAME = 1e-12
"""Losses this close are equal, and the plainer box is taken."""
PERTURBATION_WORK = 1_500_000
"""Samples times evaluations that perturbations around the optimum may cost."""


def fit_box(
    rows: SortedRows,
    sides: Sides,
    *,
    seed: int,
    perturbations: int | None = None,
    tick: Callable[[float], None] | None = None,
) -> tuple[float, float, Minimum]:
    """Find the scalar box of least validation NLL.

    Returns `lower, upper`: 0 and 1 where no bound is better; `minimum`: in coordinates (log of lower * K, log
    of slack), or the one of them that the sides leave; its value is the NLL of the box returned.
    """
    without = rows.nll(0.0, 1.0).value
    plane = Plane(rows.num_classes, sides)
    starts = _starts(plane, rows, seed, most=4)
    if sides == "both":
        side_alone = [Plane(rows.num_classes, side) for side in ("lower", "upper")]
        (by_lower, *_), (by_upper, *_) = (_starts(one, rows, seed, most=2) for one in side_alone)
        starts += [np.array([by_lower[0], FAINT]), np.array([FAINT, by_upper[0]])]
    loss = plane.loss(rows)
    starts.sort(key=lambda point: loss(point)[0])
    if perturbations is None:
        perturbations = int(np.clip(PERTURBATION_WORK / (15 * rows.num_rows), 2, 64))
    starts = starts[:FOLLOWED]
    if perturbations:
        starts[0] = descend(loss, starts[0], plane.limits)[0]
        starts += _along_the_axes(plane, loss, starts[0])
    minimum = best_of(loss, starts, plane.limits, perturbations=perturbations, seed=seed, tick=tick)
    lower, upper = plane.box(minimum.coordinates)
    if without <= minimum.value + SAME:
        return 0.0, 1.0, replace(minimum, value=without)
    for candidate in ((0.0, upper), (lower, 1.0)):
        value = rows.nll(*candidate).value
        if value <= minimum.value + SAME:
            return *candidate, replace(minimum, value=value)
    return lower, upper, minimum


class Plane:
    """The coordinates of a box, and the loss over them."""

    def __init__(self, num_classes: int, sides: Sides) -> None:
        self.num_classes = num_classes
        self.use_lower, self.use_upper = sides != "upper", sides != "lower"
        self.dimensions = self.use_lower + self.use_upper
        self.limits: Limits = [(NARROWEST, WIDEST)] * self.dimensions

    def box(self, coordinates: Array) -> tuple[float, float]:
        fraction, slack = self._split(coordinates)
        if not self.use_upper:
            return fraction / self.num_classes, 1.0
        share = 1.0 - 1.0 / self.num_classes
        upper = 1.0 / self.num_classes + share * (1.0 - fraction) * (1.0 - slack)
        return fraction / self.num_classes, min(max(upper, 1.0 / self.num_classes), 1.0)

    def loss(self, rows: SortedRows) -> Callable[[Array], tuple[float, Array]]:
        """Give the mean loss over some rows, and its gradient, as a function of the coordinates."""
        share = 1.0 - 1.0 / self.num_classes

        def of(coordinates: Array) -> tuple[float, Array]:
            fraction, slack = self._split(coordinates)
            value, by_lower, by_upper = rows.nll(*self.box(coordinates))
            gradient = []
            if self.use_lower:
                through_upper = by_upper * share * (1.0 - slack) if self.use_upper else 0.0
                gradient.append(fraction * (by_lower / self.num_classes - through_upper))
            if self.use_upper:
                gradient.append(-slack * by_upper * share * (1.0 - fraction))
            return value, np.array(gradient)

        return of

    def _split(self, coordinates: Array) -> tuple[float, float]:
        fraction = math.exp(coordinates[0]) if self.use_lower else 0.0
        slack = math.exp(coordinates[-1]) if self.use_upper else 0.0
        return fraction, slack


def _axis(count: int) -> Array:
    """Points along a coordinate, from a loose bound to a tight one."""
    return np.log(np.geomspace(1e-8, 0.95, count))


def _along_the_axes(plane: Plane, loss: Callable[[Array], tuple[float, Array]], best: Array) -> list[Array]:
    """Find the lowest minima of the loss on all rows in each coordinate, the other fixed at the best point.

    A gain on a few rare rows is not visible in a sample of the rows, and has a local minimum of its own.
    """
    found = []
    for coordinate in range(plane.dimensions):
        points = np.tile(best, (AXIS, 1))
        points[:, coordinate] = _axis(AXIS)
        found += local_minima(loss, points, LOCAL_MINIMA)
    return found


def _starts(plane: Plane, rows: SortedRows, seed: int, *, most: int) -> list[Array]:
    """Find distant low points of the whole plane by a grid and descents on a sample of the rows."""
    order = np.random.default_rng(seed).permutation(rows.num_rows)
    few, some = (rows.rows(np.sort(order[:count])) for count in SAMPLES)
    if plane.dimensions == 1:  # few points to look at, so all the more rows: what one bound cures may be rare
        few = some
    axis = _axis(18)
    points = np.stack(np.meshgrid(*[axis] * plane.dimensions, indexing="ij"), axis=-1)
    points = points.reshape(-1, plane.dimensions)
    loss = plane.loss(few)
    values = np.array([loss(point)[0] for point in points])
    lowest = distinct(points[np.argsort(values, kind="stable")], DISTANT, most)
    loss = plane.loss(some)
    ends = sorted(
        (descend(loss, start, plane.limits, tolerance=1e-8) for start in lowest), key=lambda end: end[1]
    )
    return distinct([end[0] for end in ends], DISTANT / 4, 3)
