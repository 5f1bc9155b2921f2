"""`fit`, the entry to every fit: it checks the data, fits the parts of a method, certifies the result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calibrators.bound_maps.constant import ConstantBounds
from calibrators.calibrator import Calibrator
from calibrators.data import check_validation_set
from calibrators.fitting.constant_box import SAME, Sides, fit_box
from calibrators.fitting.descent import Minimum, best_of
from calibrators.fitting.joint import JointObjective
from calibrators.fitting.result import Certificate, FitResult, Progress
from calibrators.fitting.temperature import fit_temperature
from calibrators.logit_maps.base import LogitMap
from calibrators.logit_maps.identity import Identity
from calibrators.logit_maps.temperature import HIGHEST, LOWEST, TemperatureScaling
from calibrators.method import parse
from calibrators.operator.uniform import SortedRows

SIDES: dict[str, Sides] = {"pb": "both", "pb-lower": "lower", "pb-upper": "upper"}


def fit(
    method: str, logits: Any, labels: Any, *, seed: int = 0, progress: Progress | None = None
) -> FitResult:
    """Fit a calibrator to validation data by minimising the mean negative log-likelihood.

    The same data, method and seed give the same calibrator. The unchanged logits are always a candidate, so
    the fitted NLL is never above theirs.

    Parameters
    ----------
    method : str
        One of `methods()`, or `auto`, which chooses one by cross-validated NLL.
    logits : array_like of shape (N, K)
        Scores of a backbone on data it was not trained on; any floating dtype, computed in float64.
    labels : array_like of shape (N,)
        Class indices, 0 to K - 1.
    seed : int
        Of the folds and of the points that a search visits.
    progress : callable, optional
        Called as `progress(fraction, stage)` from this thread. Whatever it raises ends the fit, which is how
        one is cancelled.

    Returns
    -------
    FitResult

    Raises
    ------
    InvalidDataError
        Naming the row and the value that no fit can use.
    UnknownMethodError
        If there is no such method.
    """
    started = time.perf_counter()
    scores, classes = check_validation_set(logits, labels)
    if method == "auto":
        from calibrators.selection import choose  # noqa: PLC0415 - it fits candidates itself

        return choose(scores, classes, seed=seed, progress=progress, started=started)
    calibrator, nll, certificate = fit_checked(method, scores, classes, seed=seed, progress=progress)
    return FitResult(calibrator, method, nll, certificate, time.perf_counter() - started)


def fit_checked(
    name: str, scores: Tensor, labels: Tensor, *, seed: int = 0, progress: Progress | None = None
) -> tuple[Calibrator, float, Certificate]:
    """Fit one method to data that `check_validation_set` has passed."""
    method = parse(name)
    num_classes = scores.shape[1]
    report = progress or (lambda fraction, stage: None)
    report(0.0, f"fitting {name}")

    def tick(begin: float, end: float) -> Callable[[float], None]:
        return lambda fraction: report(begin + (end - begin) * fraction, f"fitting {name}")

    uncalibrated = mean_nll(scores, labels)
    logit_map = method.logit_map(num_classes)
    if isinstance(logit_map, Identity):
        bounds, nll, minimum = _fit_box_alone(scores, labels, method.bounds, seed, tick(0.05, 1.0))
    else:
        minimum = _fit_map(logit_map, scores, labels, seed, tick(0.0, 0.4 if method.bounds else 1.0))
        bounds = ConstantBounds(num_classes)
        nll = mean_nll(_mapped(logit_map, scores), labels)
        if method.bounds:
            bounds, nll, minimum = _fit_jointly(
                logit_map,
                scores,
                labels,
                alone=minimum.coordinates,
                alone_nll=nll,
                seed=seed,
                tick=tick(0.4, 1.0),
            )
    if nll >= uncalibrated - SAME:
        logit_map, bounds, nll = method.logit_map(num_classes), ConstantBounds(num_classes), uncalibrated
    calibrator = Calibrator(name, logit_map, bounds, num_classes)
    on_boundary, notes = _remarks(calibrator, method.bounds, nll >= uncalibrated)
    certificate = Certificate(
        gradient_norm=minimum.gradient_norm,
        starts=minimum.starts,
        starts_agreeing=minimum.starts_agreeing,
        on_boundary=on_boundary,
        uncalibrated_nll=uncalibrated,
        evaluations=minimum.evaluations,
        notes=notes,
    )
    report(1.0, f"fitted {name}")
    return calibrator, nll, certificate


def mean_nll(scores: Tensor, labels: Tensor) -> float:
    """Mean negative log-likelihood of softmax(scores), in nats, in chunks: nothing large is copied."""
    rows = max(1, (1 << 20) // scores.shape[1])
    parts = zip(torch.split(scores, rows), torch.split(labels, rows), strict=True)
    return sum(float(torch.nn.functional.cross_entropy(z, y, reduction="sum")) for z, y in parts) / len(
        labels
    )


def _fit_box_alone(
    scores: Tensor, labels: Tensor, bounds: str, seed: int, tick: Callable[[float], None]
) -> tuple[ConstantBounds, float, Minimum]:
    num_classes = scores.shape[1]
    if not bounds:
        nothing = Minimum(np.empty(0), mean_nll(scores, labels), 0.0, 1, 1, 1)
        return ConstantBounds(num_classes), nothing.value, nothing
    lower, upper, minimum = fit_box(scores, labels, SIDES[bounds], seed=seed, tick=tick)
    return ConstantBounds(num_classes, lower, upper), minimum.value, minimum


def _fit_map(
    logit_map: LogitMap, scores: Tensor, labels: Tensor, seed: int, tick: Callable[[float], None]
) -> Minimum:
    """Fit a logit map alone and leave its parameters in it."""
    if isinstance(logit_map, TemperatureScaling):
        temperature, slope, rounds = fit_temperature(scores, labels)
        coordinates = np.array([math.log(temperature)])
        minimum = Minimum(coordinates, math.nan, abs(slope), 1, 1, rounds)
    else:
        objective = JointObjective(logit_map, False, scores, labels)
        starts = [start.numpy() for start in logit_map.starts()]
        minimum = best_of(objective, starts, objective.limits, seed=seed, tick=tick)
    logit_map.set_parameters(logit_map.parameters_from(torch.from_numpy(minimum.coordinates)))
    tick(1.0)
    return minimum


def _fit_jointly(
    logit_map: LogitMap,
    scores: Tensor,
    labels: Tensor,
    *,
    alone: np.ndarray[Any, Any],
    alone_nll: float,
    seed: int,
    tick: Callable[[float], None],
) -> tuple[ConstantBounds, float, Minimum]:
    """Fit map and box together, from the map fitted alone and from the box fitted alone."""
    num_classes = scores.shape[1]
    objective = JointObjective(logit_map, True, scores, labels)
    fresh = type(logit_map)(num_classes)
    starts = []
    for coordinates in (alone, logit_map.starts()[0].numpy(), (alone + logit_map.starts()[0].numpy()) / 2):
        fresh.set_parameters(logit_map.parameters_from(torch.from_numpy(coordinates)))
        _, _, box = fit_box(_mapped(fresh, scores), labels, "both", seed=seed)
        starts.append(np.concatenate([coordinates, box.coordinates]))
    minimum = best_of(objective, starts, objective.limits, hops=4, seed=seed, tick=tick)
    if alone_nll <= minimum.value + SAME:
        return ConstantBounds(num_classes), alone_nll, minimum
    best = torch.from_numpy(minimum.coordinates)
    logit_map.set_parameters(logit_map.parameters_from(best[: objective.map_size]))
    lower, upper = (bound.item() for bound in objective.box(best))
    rows = SortedRows(_mapped(logit_map, scores), labels)
    boxes = [(0.0, 1.0), (0.0, upper), (lower, 1.0), (lower, upper)]
    nlls = [rows.nll(*box).value for box in boxes]
    plainest = next(i for i, value in enumerate(nlls) if value <= min(nlls) + SAME)
    return ConstantBounds(num_classes, *boxes[plainest]), nlls[plainest], minimum


@torch.no_grad()
def _mapped(logit_map: LogitMap, scores: Tensor) -> Tensor:
    mapped: Tensor = logit_map(scores)
    return mapped


def _remarks(calibrator: Calibrator, bounds: str, unchanged: bool) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the parameters at the edge of their range, and say in words what a user should know."""
    edges, notes = [], []
    box = calibrator.bound_map
    if bounds in ("pb", "pb-lower") and box.lower.item() <= 0.0:
        edges.append("lower")
    if bounds in ("pb", "pb-upper") and box.upper.item() >= 1.0:
        edges.append("upper")
    if bounds and box.is_vacuous:
        notes.append("No bound lowers the validation NLL, so the learned bounds hold nothing back.")
    if isinstance(calibrator.logit_map, TemperatureScaling):
        temperature = calibrator.logit_map.temperature.item()
        if not LOWEST * 1.001 < temperature < HIGHEST * 0.999:
            edges.append("temperature")
            notes.append(f"The temperature ended at the edge of its range, {temperature:g}.")
    if unchanged and calibrator.method != "uncalibrated":
        notes.append("Nothing this method can do lowers the validation NLL; the logits are unchanged.")
    return tuple(edges), tuple(notes)
