"""One method fitted to checked data: its parts put together, searched for and certified."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.bound_maps.constant import ConstantBounds
from boxcal.calibrators.calibrator import Calibrator
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.fitting.certify import mean_nll, remarks
from boxcal.calibrators.fitting.closed_form_gradients import objective_of
from boxcal.calibrators.fitting.constant_box import SAME, Sides, fit_box
from boxcal.calibrators.fitting.descent import Minimum, best_held_out, best_of, descend, distinct
from boxcal.calibrators.fitting.joint import JointObjective, dense_loss
from boxcal.calibrators.fitting.result import Certificate, FitResult, Progress
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.logit_maps.chain import Chain
from boxcal.calibrators.logit_maps.identity import Identity
from boxcal.calibrators.logit_maps.logit_bounding import LogitBounding
from boxcal.calibrators.logit_maps.temperature import TemperatureScaling
from boxcal.calibrators.method import BOUND_MAPS, parse

SIDES: dict[str, Sides] = {"pb": "both", "pb-lower": "lower", "pb-upper": "upper"}
SCREENED = 1000
"""Where a map has many starts: the rows on which they are compared."""
WARMED, WARM_DISTANT = 2000, 0.1
"""Large sets: the rows on which descents begin, and how far apart two ends are that go on to all rows."""
HELD_OUT = 5
"""One in so many samples is held out while a network is fitted."""
JOINT_PERTURBATIONS = 4

Tick = Callable[[float], None]


def fit_checked(
    name: str,
    data: ValidationSet,
    *,
    seed: int = 0,
    progress: Progress | None = None,
    thorough: bool = True,
) -> FitResult:
    """Fit one method to data that `check_validation_set` has passed.

    A fit that is not thorough follows fewer starts and makes no perturbations around the optimum, which
    is enough to compare methods by.
    """
    started = time.perf_counter()
    method = parse(name)

    def tick(fraction: float) -> None:
        if progress:
            progress(fraction, f"fitting {name}")

    search = _Search(seed, thorough)
    tick(0.0)
    uncalibrated = mean_nll(data.scores, data.labels)
    logit_map = method.logit_map(data.num_classes)
    source = logit_map.source(data)
    logit_map.prepare(data)
    bound_map: BoundMap = ConstantBounds(data.num_classes)
    box_alone = isinstance(logit_map, Identity) and method.bounds in SIDES
    if box_alone:
        lower, upper, minimum = fit_box(
            data.scores,
            data.labels,
            SIDES[method.bounds],
            seed=seed,
            perturbations=None if thorough else 0,
            tick=tick,
        )
        bound_map = ConstantBounds(data.num_classes, lower, upper)
    else:
        minimum = _fit_alone(logit_map, data, source, search, _part(tick, 0.0, 0.4))
        if method.clipped:
            logit_map = Chain(logit_map, LogitBounding(data.num_classes))
            minimum = _fit_chain(
                logit_map, minimum, source, data.labels, search=search, tick=_part(tick, 0.4, 1.0)
            )
        elif method.bounds:
            bound_map = BOUND_MAPS[method.bounds](data.num_classes)
            minimum = _fit_jointly(
                logit_map, bound_map, minimum, source, data.labels, search=search, tick=_part(tick, 0.4, 1.0)
            )
            bound_map = _plainest(logit_map, bound_map, data, source)
    nll = minimum.value if box_alone else _nll(logit_map, bound_map, source, data.labels)
    logit_map.release()
    if nll >= uncalibrated - SAME:
        logit_map = method.logit_map(data.num_classes)
        logit_map.prepare(data)
        logit_map.release()
        if method.clipped:
            logit_map = Chain(logit_map, LogitBounding(data.num_classes))
        bound_map = BOUND_MAPS.get(method.bounds, ConstantBounds)(data.num_classes)
        nll = uncalibrated
    calibrator = Calibrator(name, logit_map, bound_map, data.num_classes)
    on_boundary, notes = remarks(calibrator, method.bounds, unchanged=nll >= uncalibrated)
    certificate = Certificate(
        gradient_norm=minimum.gradient_norm,
        starts=minimum.starts,
        starts_agreeing=minimum.starts_agreeing,
        on_boundary=on_boundary,
        uncalibrated_nll=uncalibrated,
        evaluations=minimum.evaluations,
        notes=notes,
    )
    tick(1.0)
    return FitResult(calibrator, name, nll, certificate, time.perf_counter() - started)


def _part(tick: Tick, begin: float, end: float) -> Tick:
    return lambda fraction: tick(begin + (end - begin) * fraction)


class _Search(NamedTuple):
    """How to look for an optimum: with which seed, and whether with perturbations."""

    seed: int
    thorough: bool


def _minimise(
    objective: JointObjective,
    starts: list[Tensor],
    *,
    perturbations: int,
    network: bool,
    search: _Search,
    tick: Tick,
) -> Minimum:
    """Descend over an objective: on all rows, or, for a network, on most and judged by the others."""
    limits = objective.limits
    points = [start.numpy() for start in starts]
    order = torch.from_numpy(np.random.default_rng(search.seed).permutation(len(objective.labels)))
    followed = objective.logit_map.followed
    if len(points) > followed:
        some = objective.rows(order[:SCREENED])
        points.sort(key=lambda point: some(point)[0])
        points = points[:followed]
    if network:
        held = torch.zeros(len(order), dtype=torch.bool)
        held[order[::HELD_OUT]] = True
        used = ~held if len(order) >= 2 * HELD_OUT else torch.ones_like(held)
        return best_held_out(objective.rows(used), objective.rows(held), points, limits, tick=tick)
    if len(points) > 1 and len(order) > 2 * WARMED:
        some = objective.rows(order[:WARMED])
        ends = sorted(
            (descend(some, point, limits, tolerance=1e-10) for point in points), key=lambda end: end[1]
        )
        points = distinct([end[0] for end in ends], WARM_DISTANT, followed)
    if search.thorough:
        return best_of(objective, points, limits, perturbations=perturbations, seed=search.seed, tick=tick)
    return best_of(objective, points[: len(points) // 2 + 1], limits, tolerance=1e-9, tick=tick)


def _fit_alone(
    logit_map: LogitMap, data: ValidationSet, source: Tensor, search: _Search, tick: Tick
) -> Minimum:
    """Fit a logit map without a box, and leave its parameters in it."""
    solution = logit_map.solve(data, search.seed, tick)
    if solution:
        return Minimum(logit_map.coordinates(), math.nan, *solution)
    objective = objective_of(logit_map, None, source, data.labels)
    minimum = _minimise(
        objective,
        list(logit_map.starts()),
        perturbations=logit_map.perturbations,
        network=logit_map.is_network,
        search=search,
        tick=tick,
    )
    logit_map.set_coordinates(torch.from_numpy(minimum.coordinates))
    return minimum


def _fit_chain(
    chain: Chain, alone: Minimum, source: Tensor, labels: Tensor, *, search: _Search, tick: Tick
) -> Minimum:
    """Fit two maps together, from the first one fitted alone and from its own first start."""
    bases = [torch.from_numpy(alone.coordinates), chain.first.starts()[0]]
    objective = JointObjective(chain, None, source, labels)
    minimum = _minimise(
        objective,
        list(chain.starts_from(bases)),
        perturbations=JOINT_PERTURBATIONS,
        network=chain.is_network,
        search=search,
        tick=tick,
    )
    chain.set_coordinates(torch.from_numpy(minimum.coordinates))
    return minimum


def _fit_jointly(
    logit_map: LogitMap,
    bound_map: BoundMap,
    alone: Minimum,
    source: Tensor,
    labels: Tensor,
    *,
    search: _Search,
    tick: Tick,
) -> Minimum:
    """Fit a logit map and a box together, and leave their parameters in them.

    It starts from the map fitted alone and from its own first start, each with its best constant box.
    """
    settled = torch.from_numpy(alone.coordinates)
    bases = [settled] if logit_map.size == 0 else [settled, logit_map.starts()[0]]
    starts = []
    for base in bases:
        logit_map.set_coordinates(base)
        mapped = _mapped(logit_map, source)
        if base is settled:
            bound_map.prepare(mapped)
        thorough = search.thorough and base is settled
        _, _, box = fit_box(mapped, labels, "both", seed=search.seed, perturbations=None if thorough else 0)
        starts += [
            torch.cat([base, start]) for start in bound_map.starts_at(torch.from_numpy(box.coordinates))
        ]
    if search.thorough and isinstance(bound_map, ConstantBounds):
        starts += _tempered_starts(logit_map, source, labels, search)
    objective = objective_of(logit_map, bound_map, source, labels)
    minimum = _minimise(
        objective,
        starts,
        perturbations=JOINT_PERTURBATIONS,
        network=logit_map.is_network or bound_map.is_network,
        search=search,
        tick=tick,
    )
    own, others = objective.split(torch.from_numpy(minimum.coordinates))
    logit_map.set_coordinates(own)
    bound_map.set_coordinates(others)
    return minimum


def _tempered_starts(logit_map: LogitMap, source: Tensor, labels: Tensor, search: _Search) -> list[Tensor]:
    """Give the optimum of `ts+pb` as a start, to a map that contains it and asks for it."""
    if not logit_map.tempered(0.0):
        return []
    scaling, bounds = TemperatureScaling(logit_map.num_classes), ConstantBounds(logit_map.num_classes)
    alone = _fit_alone(scaling, ValidationSet(source, labels), source, search, lambda _: None)
    minimum = _fit_jointly(scaling, bounds, alone, source, labels, search=search, tick=lambda _: None)
    log_temperature, *box = minimum.coordinates
    return [torch.cat([start, torch.tensor(box)]) for start in logit_map.tempered(log_temperature)]


def _plainest(logit_map: LogitMap, bound_map: BoundMap, data: ValidationSet, source: Tensor) -> BoundMap:
    """Drop those of two constant bounds that lower no loss."""
    if not isinstance(bound_map, ConstantBounds):
        return bound_map
    lower, upper = bound_map.lower.item(), bound_map.upper.item()
    boxes = [(0.0, 1.0), (0.0, upper), (lower, 1.0), (lower, upper)]
    candidates = [ConstantBounds(data.num_classes, *box) for box in boxes]
    losses = [_nll(logit_map, candidate, source, data.labels) for candidate in candidates]
    return next(one for one, loss in zip(candidates, losses, strict=True) if loss <= min(losses) + SAME)


@torch.no_grad()
def _mapped(logit_map: LogitMap, source: Tensor) -> Tensor:
    mapped: Tensor = logit_map(source)
    return mapped


@torch.no_grad()
def _nll(logit_map: LogitMap, bound_map: BoundMap, source: Tensor, labels: Tensor) -> float:
    """Mean loss with the parameters that both maps hold."""
    mapped = _mapped(logit_map, source)
    box = [bound.expand(len(mapped), 1)[:, 0].contiguous().numpy() for bound in bound_map.box(mapped)]
    return float(dense_loss(mapped.contiguous().numpy(), labels.numpy(), *box)[0].mean())
