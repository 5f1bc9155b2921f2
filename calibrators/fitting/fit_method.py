"""One method fitted to checked data: its parts put together, searched for and certified.

What a certificate says besides numbers: parameters at the edge of their range, and remarks for users.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.array_ops import row_max, row_sum
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.fitting.clip_limits import fit_limits
from boxcal.calibrators.fitting.constant_box import SAME, Sides, fit_box
from boxcal.calibrators.fitting.descent import Array, Minimum
from boxcal.calibrators.fitting.dual_loss import fit_shift
from boxcal.calibrators.fitting.fitted_method import Fitted
from boxcal.calibrators.fitting.network_validation import WARMED
from boxcal.calibrators.fitting.networks import Place, around, mean_of_networks
from boxcal.calibrators.fitting.objective import Objective
from boxcal.calibrators.fitting.penalty_search import fit_linear, lowest_minimum
from boxcal.calibrators.fitting.result import Certificate, FitResult, Progress
from boxcal.calibrators.fitting.rows import FitRows
from boxcal.calibrators.maps.base import BoxMap, LogitMap
from boxcal.calibrators.maps.chain import Chain
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.dual_bounding import DualProbabilityBounding
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.maps.linear import LinearMap
from boxcal.calibrators.maps.logit_bounding import LogitBounding
from boxcal.calibrators.maps.mixture import Mixture
from boxcal.calibrators.maps.network import NetworkMap
from boxcal.calibrators.maps.network_box import InstanceDependentBounds
from boxcal.calibrators.maps.temperature import TemperatureScaling
from boxcal.calibrators.method import BOUND_MAPS, MIXED, Method, parse
from boxcal.calibrators.operator.uniform import SortedRows
from boxcal.calibrators.threads import over_blocks

LARGEST_SCALE = 1e100
LARGEST_GRADIENT = 1e-4
"""Remaining gradients above this are remarked on."""
CHUNK = 1 << 20
"""Entries of the logits worked on at once."""


def mean_nll(data: ValidationSet) -> float:
    """Mean negative log-likelihood of the logits, in nats, in blocks: nothing large is copied."""

    def work(rows: slice) -> float:
        part, labels = data.logits[rows].astype(np.float64), data.labels[rows]
        part -= row_max(part)
        losses = np.log(row_sum(np.exp(part))[:, 0]) - np.take_along_axis(part, labels[:, None], axis=1)[:, 0]
        return float(losses.sum() if data.weights is None else losses @ data.weights[rows])

    return sum(over_blocks(work, len(data), max(1, CHUNK // data.num_classes))) / len(data)


def check_scale(data: ValidationSet) -> None:
    """Refuse logits too large or too small to compute with."""
    scale = data.scale
    if not 1.0 / LARGEST_SCALE <= scale <= LARGEST_SCALE:
        raise InvalidDataError(
            f"the largest logit of a row lies {scale:g} above the row's mean on average;"
            f" fits take {1.0 / LARGEST_SCALE:g} to {LARGEST_SCALE:g}"
        )


def remarks(found: Fitted, bounds: str, *, unchanged: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the parameters at the edge of their range, and say in words what a user should know."""
    edges, notes = [], []
    box, minimum = found.bound_map, found.minimum
    if bounds and isinstance(box, ConstantBounds):
        lower, upper = box.pair
        if bounds != "pb-upper" and lower <= 0.0:
            edges.append("lower")
        if bounds != "pb-lower" and upper >= 1.0:
            edges.append("upper")
        if box.is_vacuous:
            notes.append("No bound lowers the validation NLL, so the learned bounds hold nothing back.")
    at_edges = found.logit_map.edges()
    edges += at_edges
    notes += at_edges.values()
    if unchanged and not isinstance(found.logit_map, IdentityMap):
        notes.append("Nothing this method can do lowers the validation NLL; the logits are unchanged.")
    elif minimum.gradient_norm > LARGEST_GRADIENT:
        reason = ""
        if minimum.epochs is not None:
            reason = f" Cross-validation stopped it after {minimum.epochs} iterations."
        if minimum.epochs == 0:
            reason = (
                " No network was better than constant answers by one standard error of the cross-validation."
            )
        notes.append(f"The fit ended with a gradient of {minimum.gradient_norm:.1e}.{reason}")
    return tuple(edges), tuple(notes)


Search = Callable[..., Minimum]
SEARCHES: dict[type[LogitMap], Search] = {
    LinearMap: fit_linear,
    LogitBounding: fit_limits,
    DualProbabilityBounding: fit_shift,
}
"""How maps are fitted alone that are not left to descents from their starts."""
FEWEST_LOGITS: dict[type[LogitMap], int] = {DualProbabilityBounding: 200_000}
"""Logits from which on such a search is the quicker one."""
SIDES: dict[str, Sides] = {"pb": "both", "pb-lower": "lower", "pb-upper": "upper"}
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
    check_scale(data)
    if method.mixed:
        return _fit_mixed(name, data, seed=seed, progress=progress, thorough=thorough)
    report = progress or (lambda fraction, stage: None)
    report(0.0, f"fitting {name}")
    uncalibrated = mean_nll(data)
    reached = 0.0

    def tick(fraction: float) -> None:
        nonlocal reached  # one of several descents begins
        reached = max(reached, fraction)
        report(reached, f"fitting {name}")

    fits = _Fits(data, seed, thorough, tick, known)
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
    calibrator = ArrayCalibrator(name, found.logit_map, found.bound_map, data.num_classes)
    return FitResult(calibrator, name, nll, certificate, time.perf_counter() - started)


def _fit_mixed(name: str, data: ValidationSet, **options: Any) -> FitResult:
    """Fit a method to what a mixture makes of the logits."""
    size = data.num_classes
    mixture = Mixture.of(data, data.effective)
    found = fit_checked(name.removeprefix(MIXED), data.with_logits(mixture.over(data.scores)), **options)
    nll, uncalibrated, behind = found.nll, mean_nll(data), found.on_arrays.logit_map
    if nll >= uncalibrated - SAME:
        nll, mixture, behind = uncalibrated, Mixture(size), parse(name).logit_map(size)
    return replace(
        found,
        on_arrays=ArrayCalibrator(name, Chain(mixture, behind), ConstantBounds(size), size),
        method=name,
        nll=nll,
        certificate=replace(found.certificate, uncalibrated_nll=uncalibrated),
    )


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
            if method.logit_map is IdentityMap and method.bounds in SIDES:
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

    def _box(self, bounds: str = "") -> BoxMap:
        return BOUND_MAPS.get(bounds, ConstantBounds)(self.data.num_classes)

    def _clip(self) -> LogitBounding:
        return LogitBounding(self.data.num_classes)

    def _map(self, method: Method) -> LogitMap:
        logit_map = method.logit_map(self.data.num_classes)
        if logit_map.reads != "logits":
            logit_map.source(self.data)
        logit_map.prepare(self.data, self.tick)
        return logit_map

    def _constant_box(self, bounds: str) -> Fitted:
        K = self.data.num_classes
        lower, upper, minimum = fit_box(
            self._rows.sorted,
            SIDES[bounds],
            seed=self.seed,
            perturbations=None if self.thorough else 0,
            tick=self.tick,
        )
        return Fitted(IdentityMap(K), ConstantBounds.of(K, lower, upper), minimum)

    def _alone(self, method: Method) -> Fitted:
        """Fit a logit map without a box."""
        logit_map = self._map(method)
        is_tempered = self.data.shows_errors or not isinstance(logit_map, LinearMap)  # else it stays 1
        contains = (TemperatureScaling.name,) if logit_map.contains_ts and is_tempered else ()
        solution = logit_map.solve(self.data, self.tick)
        if solution:
            minimum = Minimum(logit_map.coordinates(), math.nan, *solution)
            return Fitted(logit_map, self._box(), minimum, contains).valued(self.data)
        kept = [logit_map.tempered(self.of(name).log_temperature)[0] for name in contains]
        search = next((SEARCHES[one] for one in type(logit_map).__mro__ if one in SEARCHES), None)
        if search and self.data.logits.size >= FEWEST_LOGITS.get(type(logit_map), 0):
            minimum = search(logit_map, self.data, seed=self.seed, thorough=self.thorough, tick=self.tick)
        else:
            objective, starts = self._objective(logit_map, None), list(logit_map.starts())
            if isinstance(logit_map, NetworkMap):
                maps = [(one, self._box()) for one in logit_map.variants(self.data.scores)]
                found = self._mean(objective, [Place(one, starts, starts) for one in maps])
                plainer = [Fitted.at(maps[0], point, found.minimum) for point in kept]
                return replace(self._lowest(found, plainer), contains=contains)
            minimum = self._minimum(objective, starts, kept, logit_map.perturbations)
        logit_map.set_coordinates(minimum.coordinates)
        return Fitted(logit_map, self._box(), minimum, contains).valued(self.data)

    def _joined(self, method: Method) -> Fitted:
        """Fit a logit map jointly with a box or with logit bounding, from the optima of what it contains."""
        base, addition = method.logit_map.name, LogitBounding.name if method.clipped else method.bounds
        alone, logit_map, box = self.of(base), self._map(method), self._box(method.bounds)
        logit_map.adopt(alone.logit_map)
        mapped = alone.mapped(self.data)
        box.prepare(mapped)
        bases, contains = [alone.members], [base]
        kept: list[Array] = []
        plainer: list[Fitted] = []
        other: Fitted | None = None
        if method.logit_map is not IdentityMap:
            contains.append(f"{TemperatureScaling.name}+{addition}" if logit_map.contains_ts else addition)
            other = self.of(contains[1])
            if logit_map.contains_ts:
                bases.append(list(logit_map.tempered(other.log_temperature)))
                if box.is_network:
                    plainer.append(Fitted.at((logit_map, other.bound_map), bases[1][0], other.minimum))
                else:
                    kept.append(np.concatenate([bases[1][0], self._constant_part(other)]))
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
        elif isinstance(box, InstanceDependentBounds):
            contains.append("pb" if method.logit_map is IdentityMap else f"{base}+pb")
            constant = self.of(contains[-1])
            places = around((logit_map, box), alone, other, constant, mapped)
            starts = []
            plainer.append(replace(constant, bound_map=self._same_everywhere(box, constant)))
            same = box.coordinates_of(constant.bound_map)
            plain = Place.beside((logit_map, box), alone.members, alone.folds, [same])
        else:
            starts = [np.concatenate([base[0], self._best_box(logit_map, base[0])]) for base in bases]
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
    def _constant_part(other: Fitted) -> Array:
        """Coordinates of the logit bounding or of the constant box of a fit."""
        if isinstance(other.logit_map, Chain):
            return other.logit_map.second.coordinates()
        return other.bound_map.coordinates()

    def _same_everywhere(self, box: InstanceDependentBounds, constant: Fitted) -> BoxMap:
        """Give a network that answers constant bounds."""
        same = type(box)(box.num_classes)
        same.prepare(constant.mapped(self.data))
        return same.moved(same.coordinates_of(constant.bound_map))

    def _lowest(self, found: Fitted, plainer: Sequence[Fitted]) -> Fitted:
        """Give the fit, or one of the plainer ones that is lower."""
        for one in (plain.valued(self.data) for plain in plainer):
            if one.minimum.value < found.minimum.value - SAME:
                found = one
        return found

    def _found(
        self,
        logit_map: LogitMap,
        box: BoxMap,
        starts: Sequence[Place | Array],
        kept: list[Array],
        plain: Place | None,
    ) -> Fitted:
        """Minimise over the coordinates of both maps, and leave their parameters in them."""
        objective = self._objective(logit_map, None if isinstance(logit_map, Chain) else box)
        places = [start for start in starts if isinstance(start, Place)]
        points = [start for start in starts if isinstance(start, np.ndarray)]
        if places:
            found = self._mean(objective, places, plain)
        else:
            minimum = self._minimum(objective, points, kept, JOINT_PERTURBATIONS)
            found = Fitted.at((logit_map, box), minimum.coordinates, minimum).valued(self.data)
        if not isinstance(found.bound_map, ConstantBounds):
            return found
        lower, upper = found.bound_map.pair
        boxes = [(0.0, 1.0), (0.0, upper), (lower, 1.0), (lower, upper)]
        ends = [
            replace(
                found,
                bound_map=ConstantBounds.of(self.data.num_classes, *limits),
            ).valued(self.data)
            for limits in dict.fromkeys(boxes)
        ]
        lowest = min(end.minimum.value for end in ends)
        return next(end for end in ends if end.minimum.value <= lowest + SAME)

    def _objective(self, logit_map: LogitMap, box: BoxMap | None) -> Objective:
        if logit_map.reads == "logits":
            return Objective(logit_map, box, self._rows)
        rows = FitRows(logit_map.source(self.data), self.data.labels, self.data.weights)
        return Objective(logit_map, box, rows)

    @cached_property
    def _rows(self) -> FitRows:
        """The logits, prepared once for all objectives."""
        return FitRows(self.data.scores, self.data.labels, self.data.weights)

    def _mean(self, objective: Objective, places: Sequence[Place], plain: Place | None = None) -> Fitted:
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

    def _best_box(self, logit_map: LogitMap, start: Array) -> Array:
        """Coordinates of the best constant box behind a map, on some of the samples."""
        data = self._some
        mapped = logit_map.moved(start)(logit_map.source(data))
        rows = SortedRows(mapped, data.labels, data.weights)
        *_, box = fit_box(rows, "both", seed=self.seed, perturbations=0)
        return box.coordinates

    def _minimum(
        self, objective: Objective, starts: list[Array], kept: list[Array], perturbations: int
    ) -> Minimum:
        """Descend from the starts."""
        return lowest_minimum(
            objective,
            starts,
            kept,
            self._order,
            perturbations=perturbations,
            thorough=self.thorough,
            seed=self.seed,
            tick=self.tick,
        )

    @cached_property
    def _some(self) -> ValidationSet:
        """Enough of the samples to find where to start."""
        if len(self.data) <= 2 * WARMED:
            return self.data
        return self.data.rows(self._order[:WARMED])

    @cached_property
    def _order(self) -> Array:
        """A random order of the samples."""
        return np.random.default_rng(self.seed).permutation(len(self.data))
