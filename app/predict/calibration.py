"""From logits to calibrated rows: one call of the calibrator for all requests of a batch that share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from boxcal.app.activation.active import ServedCalibrator
from boxcal.app.errors import InvalidLogits
from boxcal.app.predict.answers import Float64Array, Rows
from boxcal.app.predict.entries import Part
from boxcal.app.predict.request_bounds import RequestBounds
from boxcal.calibrators.calibrator import Calibrated, Calibrator
from boxcal.calibrators.operator import Bounds
from boxcal.calibrators.plain_rows import PlainRows, plain_rows

SUM_TOLERANCE = 1e-6
"""How far a row of probabilities may be from adding up to 1."""


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationRequest:
    """What one request wants done to the logits of its samples."""

    served: ServedCalibrator
    bounds: RequestBounds | None


def calibrate_rows(logits: Tensor, wanted: CalibrationRequest) -> Rows:
    """Calibrate the logits (N, K) of one request, behind which may be features (N, D).

    Raises
    ------
    InvalidLogits
        They are not finite, or so large that the calibrator's arithmetic overflows.
    """
    bounds = wanted.bounds
    box = None if bounds is None else Bounds(torch.from_numpy(bounds.lower), torch.from_numpy(bounds.upper))
    return _calibrate(logits, wanted.served, box)


def calibrate_logits(logits: Float64Array, wanted: CalibrationRequest) -> Rows:
    """Calibrate logits (N, K) of a request: finite float64, row after row; the short way where there is one.

    Raises
    ------
    InvalidLogits
        As `calibrate_rows`.
    """
    short = _short_way(wanted.served.calibrator) if wanted.bounds is None else None
    if short is None:
        return calibrate_rows(torch.from_numpy(logits), wanted)
    try:
        probabilities, mapped = short(logits)
    except ValueError as error:
        raise InvalidLogits(f"The logits cannot be calibrated: {error}.") from error
    _check_sums(probabilities)
    box = None
    if short.box is not None:
        box = np.broadcast_to(short.box[0], logits.shape), np.broadcast_to(short.box[1], logits.shape)
    return Rows(probabilities, logits, mapped, box, np.zeros(len(logits), np.bool_))


@lru_cache(maxsize=16)
def _short_way(calibrator: Calibrator) -> PlainRows | None:
    return plain_rows(calibrator.logit_map, calibrator.bound_map, calibrator.num_classes)


def calibrate_batch(
    logits: Tensor, parts: Sequence[Part[CalibrationRequest, Rows]]
) -> list[Rows | Exception]:
    """Calibrate a batch (N, K), or (N, K + D) with features: one call for each calibrator that is named.

    A request whose rows cannot be calibrated gets an error; the others get their rows.
    """
    groups: dict[int, list[int]] = {}
    for position, part in enumerate(parts):
        groups.setdefault(id(part.context.served), []).append(position)
    outcomes: dict[int, Rows | Exception] = {}
    for members in groups.values():
        chosen = [parts[position] for position in members]
        whole = len(groups) == 1
        rows = logits if whole else torch.cat([logits[part.start : part.stop] for part in chosen])
        outcomes.update(zip(members, _calibrate_together(rows, chosen), strict=True))
    return [outcomes[position] for position in range(len(parts))]


def _calibrate_together(
    logits: Tensor, parts: Sequence[Part[CalibrationRequest, Rows]]
) -> list[Rows | Exception]:
    """Calibrate the rows of requests that share a calibrator, which lie one after another in `logits`."""
    sizes = [part.stop - part.start for part in parts]
    stops = np.cumsum(sizes).tolist()
    spans = [(stop - size, stop) for stop, size in zip(stops, sizes, strict=True)]
    try:
        rows = _calibrate(logits, parts[0].context.served, _joint_box(parts, sizes))
    except InvalidLogits:
        return [
            _calibrate_alone(logits[a:b], part.context) for (a, b), part in zip(spans, parts, strict=True)
        ]
    return [rows.part(start, stop) for start, stop in spans]


def _calibrate_alone(logits: Tensor, wanted: CalibrationRequest) -> Rows | Exception:
    try:
        return calibrate_rows(logits, wanted)
    except InvalidLogits as error:
        return error


def _joint_box(parts: Sequence[Part[CalibrationRequest, Rows]], sizes: Sequence[int]) -> Bounds | None:
    """Give every row the bounds of its request; rows share one pair where they may."""
    num_classes = parts[0].context.served.calibrator.num_classes
    bounds = [part.context.bounds for part in parts]
    if all(b is None for b in bounds):
        return None
    if len(bounds) == 1 and bounds[0] is not None:
        return Bounds(torch.from_numpy(bounds[0].lower), torch.from_numpy(bounds[0].upper))
    lower = np.zeros((sum(sizes), num_classes))
    upper = np.ones((sum(sizes), num_classes))
    row = 0
    for pair, size in zip(bounds, sizes, strict=True):
        if pair is not None:
            lower[row : row + size], upper[row : row + size] = pair.lower, pair.upper
        row += size
    return Bounds(torch.from_numpy(lower), torch.from_numpy(upper))


def _calibrate(scores: Tensor, served: ServedCalibrator, box: Bounds | None) -> Rows:
    wide = scores.to(torch.float64)
    num_classes = served.calibrator.num_classes
    logits = wide[:, :num_classes]
    try:
        read = wide[:, num_classes:] if served.calibrator.reads == "features" else logits
        calibrated = served.calibrator.calibrate(read, box)
    except ValueError as error:
        raise InvalidLogits(f"The logits cannot be calibrated: {error}.") from error
    probabilities = calibrated.probabilities.numpy()
    _check_sums(probabilities)
    return Rows(
        probabilities,
        logits.numpy(),
        calibrated.logits.numpy(),
        _box(calibrated, probabilities.shape),
        calibrated.relaxed.numpy(),
    )


def _check_sums(probabilities: Float64Array) -> None:
    """Hold every row to the promised sum, which NaN breaks too."""
    sums = np.add.reduce(probabilities, axis=1)
    off = abs(sums.item() - 1.0) if len(sums) == 1 else np.abs(sums - 1.0).max()
    if not off <= SUM_TOLERANCE:
        raise InvalidLogits("The logits are too large: the calibrator's arithmetic overflows.")


def _box(calibrated: Calibrated, shape: tuple[int, ...]) -> tuple[Float64Array, Float64Array] | None:
    """Give every row the effective box; None where it holds every probability."""
    lower, upper = calibrated.lower, calibrated.upper
    if lower.ndim == 0 and upper.ndim == 0 and lower.item() <= 0.0 and upper.item() >= 1.0:
        return None
    return np.broadcast_to(lower.numpy(), shape), np.broadcast_to(upper.numpy(), shape)
