"""One method fitted to checked data: its parts put together, searched for and certified."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.bound_maps.constant import ConstantBounds
from boxcal.calibrators.calibrator import Calibrator
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.fitting.certify import check_scale, mean_nll, remarks
from boxcal.calibrators.fitting.closed_form_gradients import objective_of
from boxcal.calibrators.fitting.constant_box import SAME, Sides, fit_box
from boxcal.calibrators.fitting.descent import Array, Minimum, best_of, descend, distinct, not_above
from boxcal.calibrators.fitting.fitted import Fitted
from boxcal.calibrators.fitting.joint import JointObjective
from boxcal.calibrators.fitting.network_validation import WARMED
from boxcal.calibrators.fitting.networks import SCREENED, Place, around, mean_of_networks
from boxcal.calibrators.fitting.result import Certificate, FitResult, Progress
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.logit_maps.chain import Chain
from boxcal.calibrators.logit_maps.identity import Identity
from boxcal.calibrators.logit_maps.logit_bounding import LogitBounding
from boxcal.calibrators.logit_maps.temperature import TemperatureScaling
from boxcal.calibrators.method import BOUND_MAPS, Method, parse
from boxcal.calibrators.operator.uniform import SortedRows

SIDES: dict[str, Sides] = {"pb": "both", "pb-lower": "lower", "pb-upper": "upper"}
WARM_DISTANT, BEHIND = 0.1, 0.01
"""Large sets, where descents begin on some of the rows: how far apart the ends are that go on to all rows,
and how many nats behind the best they may be."""
JOINT_PERTURBATIONS = 4

Tick = Callable[[float], None]


def fit_checked(
    name: str,
    data: ValidationSet,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    thorough: bool = True,
    known: dict[str, Fitted] | None = None,
) -> FitResult:
    """Fit one method to data that `check_validation_set` has passed.

    A fit that is not thorough follows fewer starts and makes no perturbations around the optimum, which
    is enough to compare methods by. `known` holds methods that earlier calls with the same data and options
    have fitted, and receives those of this call.
    """
    started = time.perf_counter()
    method = parse(name)
    report = progress or (lambda fraction, stage: None)
    report(0.0, f"fitting {name}")
    check_scale(data)
    uncalibrated = mean_nll(data)
    fits = _Fits(data, seed, thorough, lambda fraction: report(fraction, f"fitting {name}"), known)
    found = fits.of(name)
    nll = found.nll(data)
    if nll >= uncalibrated - SAME:
        found, nll = fits.unchanged(method, found.minimum), uncalibrated
    minimum = found.minimum
    on_boundary, notes = remarks(found, method.bounds, unchanged=nll >= uncalibrated)
    certificate = Certificate(
        gradient_norm=minimum.gradient_norm,
        starts=minimum.starts,
        starts_agreeing=minimum.starts_agreeing,
        on_boundary=on_boundary,
        uncalibrated_nll=uncalibrated,
        evaluations=minimum.evaluations,
        notes=notes,
        objective=minimum.value,
        contains={one: fits.of(one).minimum.value for one in found.contains},
        start_spread=minimum.spread,
        saturation=found.saturation(data),
    )
    found.logit_map.release()
    report(1.0, f"fitting {name}")
    calibrator = Calibrator(name, found.logit_map, found.bound_map, data.num_classes)
    return FitResult(calibrator, name, nll, certificate, time.perf_counter() - started)


class _Fits:
    """Fits of methods to one set, each made once: a method starts from the optima of those it contains."""

    def __init__(
        self, data: ValidationSet, seed: int, thorough: bool, tick: Tick, known: dict[str, Fitted] | None
    ) -> None:
        self.data, self.seed, self.thorough, self.tick = data, seed, thorough, tick
        self.known = {} if known is None else known

    def of(self, name: str) -> Fitted:
        """Fit a method, or give what was found before."""
        if name not in self.known:
            method = parse(name)
            if method.logit_map is Identity and method.bounds in SIDES:
                found = self._constant_box(method.bounds)
            elif method.clipped or method.bounds:
                found = self._joined(method)
            else:
                found = self._alone(method)
            self.known[name] = found
        return self.known[name]

    def unchanged(self, method: Method, minimum: Minimum) -> Fitted:
        """Build the method's maps such that they change nothing."""
        logit_map = self._unchanged_map(method)
        if method.clipped:
            logit_map = Chain(logit_map, self._clip())
        return Fitted(logit_map, self._box(method.bounds), minimum)

    def _unchanged_map(self, method: Method) -> LogitMap:
        logit_map = method.logit_map(self.data.num_classes)
        if logit_map.reads != "logits":
            logit_map.prepare(self.data)
        return logit_map

    def _box(self, bounds: str = "") -> BoundMap:
        return BOUND_MAPS.get(bounds, ConstantBounds)(self.data.num_classes)

    def _clip(self) -> LogitBounding:
        return LogitBounding(self.data.num_classes)

    def _map(self, method: Method) -> LogitMap:
        logit_map = method.logit_map(self.data.num_classes)
        logit_map.thorough = self.thorough
        if logit_map.reads != "logits":
            logit_map.source(self.data)
        logit_map.tick = self.tick
        logit_map.prepare(self.data)
        del logit_map.tick
        return logit_map

    def _constant_box(self, bounds: str) -> Fitted:
        K = self.data.num_classes
        lower, upper, minimum = fit_box(
            self._sorted,
            SIDES[bounds],
            seed=self.seed,
            perturbations=None if self.thorough else 0,
            tick=self.tick,
        )
        return Fitted(Identity(K), ConstantBounds(K, lower, upper), minimum)

    def _alone(self, method: Method) -> Fitted:
        """Fit a logit map without a box."""
        logit_map = self._map(method)
        contains = (TemperatureScaling.name,) if logit_map.contains_ts else ()
        solution = logit_map.solve(self.data, self.seed, self.tick)
        if solution:
            minimum = Minimum(logit_map.coordinates(), math.nan, *solution)
        else:
            kept = [logit_map.tempered(self.of(name).log_temperature)[0] for name in contains]
            objective = self._objective(logit_map, None)
            starts = list(logit_map.starts())
            if objective.is_network:
                maps = [(one, self._box()) for one in logit_map.variants(self.data)]
                found = self._mean(objective, [Place(one, starts, starts) for one in maps])
                plainer = [Fitted.at(maps[0], point, found.minimum) for point in kept]
                return replace(self._lowest(found, plainer), contains=contains)
            minimum = self._minimise(objective, starts, kept, logit_map.perturbations)
            logit_map.set_coordinates(torch.from_numpy(minimum.coordinates))
        return Fitted(logit_map, self._box(), minimum, contains).valued(self.data)

    def _joined(self, method: Method) -> Fitted:
        """Fit a logit map jointly with a box or with logit bounding, from the optima of what it contains."""
        base, addition = method.logit_map.name, LogitBounding.name if method.clipped else method.bounds
        alone, logit_map, box = self.of(base), self._map(method), self._box(method.bounds)
        logit_map.adopt(alone.logit_map)
        mapped = alone.mapped(self.data)
        box.prepare(mapped)
        bases, contains = [alone.members], [base]
        kept: list[Tensor] = []
        plainer: list[Fitted] = []
        other: Fitted | None = None
        # Logit bounding clips logits to multiples of their norm, which depends on a number added to a row.
        if method.logit_map is not Identity and not (method.clipped and logit_map.normalises):
            contains.append(f"{TemperatureScaling.name}+{addition}" if logit_map.contains_ts else addition)
            other = self.of(contains[1])
            if logit_map.contains_ts:
                bases.append(list(logit_map.tempered(other.log_temperature)))
                if box.is_network:
                    plainer.append(Fitted.at((logit_map, other.bound_map), bases[1][0], other.minimum))
                else:
                    kept.append(torch.cat([bases[1][0], self._constant_part(box, other)]))
            else:
                bases += [[start] for start in logit_map.starts()[:2]]
                fresh = self._unchanged_map(method)
                plainer.append(other.behind(fresh, Chain(fresh, other.logit_map) if method.clipped else None))
        places: list[Place] = []
        plain: Place | None = None
        if method.clipped:
            logit_map = Chain(logit_map, self._clip())
            plainer.append(replace(alone, logit_map=Chain(alone.logit_map, self._clip())))
            starts = list(logit_map.starts_from([base[0] for base in bases]))
            if logit_map.is_network:
                ends = [start[logit_map.first.size :] for start in logit_map.starts_from(bases[0][:1])]
                places = [Place.beside((logit_map, box), bases[0], alone.folds, [end]) for end in ends]
        elif box.is_network:
            contains.append("pb" if method.logit_map is Identity else f"{base}+pb")
            constant = self.of(contains[-1])
            places = around((logit_map, box), alone, other, constant, mapped)
            starts = []
            plainer.append(replace(constant, bound_map=self._same_everywhere(method, constant)))
            same = box.coordinates_of(constant.bound_map)
            plain = Place.beside((logit_map, box), alone.members, alone.folds, [same])
        else:
            starts = [torch.cat([base[0], self._best_box(logit_map, base[0])]) for base in bases]
            plainer.append(replace(alone, bound_map=self._box()))
            if logit_map.is_network:
                places = [
                    Place.beside((logit_map, box), base, folds, [start[logit_map.size :]])
                    for base, folds, start in zip(bases, [alone.folds, *bases[1:]], starts, strict=True)
                ]
        found = self._found(logit_map, box, places or starts, kept, plain)
        # What the objective gives for extreme logits in a box, where ties are likely, can differ a little.
        plainer += [Fitted.at((logit_map, box), point, found.minimum) for point in kept]
        return replace(self._lowest(found, plainer), contains=tuple(contains))

    @staticmethod
    def _constant_part(box: BoundMap, other: Fitted) -> Tensor:
        """Coordinates of the logit bounding or of the constant box of a fit."""
        if isinstance(other.logit_map, Chain):
            return torch.from_numpy(other.logit_map.second.coordinates())
        return box.coordinates_of(other.bound_map)

    def _same_everywhere(self, method: Method, constant: Fitted) -> BoundMap:
        """Give a network that answers constant bounds."""
        box = self._box(method.bounds)
        box.prepare(constant.mapped(self.data))
        box.set_coordinates(box.coordinates_of(constant.bound_map))
        return box

    def _lowest(self, found: Fitted, plainer: Sequence[Fitted]) -> Fitted:
        """Give the fit, or one of the plainer ones that is lower."""
        for one in (plain.valued(self.data) for plain in plainer):
            if one.minimum.value < found.minimum.value - SAME:
                found = one
        return found

    def _found(
        self,
        logit_map: LogitMap,
        box: BoundMap,
        starts: Sequence[Place | Tensor],
        kept: list[Tensor],
        plain: Place | None,
    ) -> Fitted:
        """Minimise over the coordinates of both maps, and leave their parameters in them."""
        objective = self._objective(logit_map, None if isinstance(logit_map, Chain) else box)
        places = [start for start in starts if isinstance(start, Place)]
        points = [start for start in starts if isinstance(start, Tensor)]
        if places:
            found = self._mean(objective, places, plain)
        else:
            minimum = self._minimise(objective, points, kept, JOINT_PERTURBATIONS)
            found = Fitted.at((logit_map, box), torch.from_numpy(minimum.coordinates), minimum).valued(
                self.data
            )
        if not isinstance(found.bound_map, ConstantBounds):
            return found
        lower, upper = found.bound_map.lower.item(), found.bound_map.upper.item()
        boxes = [(0.0, 1.0), (0.0, upper), (lower, 1.0), (lower, upper)]
        ends = [
            replace(found, bound_map=ConstantBounds(self.data.num_classes, *limits)).valued(self.data)
            for limits in dict.fromkeys(boxes)
        ]
        lowest = min(end.minimum.value for end in ends)
        return next(end for end in ends if end.minimum.value <= lowest + SAME)

    def _objective(self, logit_map: LogitMap, box: BoundMap | None) -> JointObjective:
        """Give the objective of a fit."""
        data, source = self.data, logit_map.source(self.data)
        sort = (lambda: self._sorted) if logit_map.reads == "logits" else None
        return objective_of(logit_map, box, source, data.labels, data.weights, sort=sort)

    @cached_property
    def _sorted(self) -> SortedRows:
        """The logits, sorted once for all objectives that read them sorted."""
        return SortedRows(self.data.scores, self.data.labels, self.data.row_weights)

    def _mean(self, objective: JointObjective, places: Sequence[Place], plain: Place | None = None) -> Fitted:
        """Fit networks, and answer their mean."""
        return mean_of_networks(
            objective,
            places,
            self.data,
            self._order,
            self.seed,
            plain=plain,
            thorough=self.thorough,
            tick=self.tick,
        )

    def _best_box(self, logit_map: LogitMap, start: Tensor) -> Tensor:
        """Coordinates of the best constant box behind a map, on some of the samples."""
        logit_map.set_coordinates(start)
        data = self._some
        with torch.no_grad():
            mapped = logit_map(logit_map.source(data))
        rows = SortedRows(mapped, data.labels, data.row_weights)
        *_, box = fit_box(rows, "both", seed=self.seed, perturbations=0)
        return torch.from_numpy(box.coordinates)

    @cached_property
    def _some(self) -> ValidationSet:
        """Enough of the samples to find where to start."""
        if len(self.data) <= 2 * WARMED:
            return self.data
        return self.data.rows(self._order[:WARMED])

    def _minimise(
        self, objective: JointObjective, starts: list[Tensor], kept: list[Tensor], perturbations: int
    ) -> Minimum:
        """Descend from the starts; the answer is not above the points kept, optima of methods contained."""
        limits, followed = objective.limits, objective.logit_map.followed
        points, rough = self._most_promising(objective, starts, followed), None
        if len(points) > 1 and len(self._order) > 2 * WARMED:
            rough = objective.rough()
            some = rough.rows(self._order[:WARMED])
            ends = [descend(some, point, limits, tolerance=1e-10) for point in points]
            ends.sort(key=lambda end: end[1])
            close = [point for point, value, _ in ends if value <= ends[0][1] + BEHIND]
            points = distinct(close, WARM_DISTANT, followed)
        if not self.thorough:
            points, perturbations = points[: len(points) // 2 + 1], 0
        minimum = best_of(
            objective,
            points,
            limits,
            perturbations=perturbations,
            tolerance=1e-14 if self.thorough else 1e-9,
            seed=self.seed,
            tick=self.tick,
            rough=None if rough is objective else rough,
        )
        return not_above(objective, minimum, map(Tensor.numpy, kept), limits)

    @cached_property
    def _order(self) -> Tensor:
        """A random order of the samples."""
        return torch.from_numpy(np.random.default_rng(self.seed).permutation(len(self.data)))

    def _most_promising(self, objective: JointObjective, starts: list[Tensor], count: int) -> list[Array]:
        """Of many starts, give those that are lowest on some of the rows."""
        points = [start.numpy() for start in starts]
        if len(points) > count:
            some = objective.rows(self._order[:SCREENED])
            with torch.no_grad():
                points.sort(key=lambda point: some(point)[0])
        return points[:count]
