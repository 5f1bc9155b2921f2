"""From samples to calibrated rows: what the batcher runs on a batch, before and after the backbone.

Most calibrators read logits. `fc` and `ta` read the features that the backbone's last layer takes; `nc` adds
a constant to the samples before the backbone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from boxcal.app.http.problems import BackboneFailed, InvalidLogits, InvalidParameter
from boxcal.app.predict.answers import Float64Array, Rows
from boxcal.app.predict.arrays import finite
from boxcal.app.predict.entries import Part
from boxcal.app.predict.options import RequestBounds
from boxcal.app.registry.activator import ServedCalibrator
from boxcal.calibrators.array_calibrator import Box
from boxcal.models.backends.backbone import Backbone, OpenBackbone

SUM_TOLERANCE = 1e-6
"""Largest accepted distance of a row's sum of probabilities from 1."""

Samples = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationRequest:
    """The calibrator and the bounds that one request asks for."""

    served: ServedCalibrator
    bounds: RequestBounds | None


class Scoring:
    """The backbone as the batcher calls it.

    A batch holds samples of many requests. While the calibrator of any request under way reads features,
    every pass returns features too, and the logits that the last layer makes of them.
    """

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._readers_of_features = 0

    @contextmanager
    def requested_by(self, served: ServedCalibrator) -> Iterator[None]:
        """Register a request under way; runs on the event loop."""
        needed = served.reads == "features"
        self._readers_of_features += needed
        try:
            yield
        finally:
            self._readers_of_features -= needed

    def __call__(self, samples: Samples, alone: bool) -> NDArray[np.float32]:
        """Return logits (N, K), or (N, K + D) with the features behind them."""
        batch = self._backbone.inputs.batch(samples)
        if not self._readers_of_features:
            return np.asarray(self._backbone(batch, alone=alone))
        if not isinstance(self._backbone, OpenBackbone) or self._backbone.head is None:
            raise InvalidParameter(
                f"The backbone {self._backbone.name} has no features, which the active calibrator reads."
            )
        features = self._backbone.features(batch)
        weight, bias = self._backbone.head
        return np.concatenate([(features @ weight.T + bias).numpy(), features.numpy()], axis=1)


def shifted(samples: Samples, served: ServedCalibrator) -> Samples:
    """Add the calibrator's constant to the backbone's inputs, if it has one."""
    shift = served.calibrator.input_shift
    return samples if shift is None else (samples + shift).astype(np.float32)


def check_reads_logits(served: ServedCalibrator) -> None:
    """Refuse a calibrator that reads more than logits."""
    if served.reads != "logits":
        raise InvalidParameter(
            f"The calibrator {served.version} (`{served.method}`) reads {served.reads}, which only /predict "
            "has; for logits set `calibrator` to another version, such as 0."
        )


def calibrate(scores: Float64Array, requested: CalibrationRequest) -> Rows:
    """Calibrate the logits (N, K) of one request, behind which may be features (N, D).

    They are float64, and finite unless the request `is_quick`.
    """
    bounds = requested.bounds
    return _calibrate(scores, requested.served, None if bounds is None else (bounds.lower, bounds.upper))


def calibrate_batch(
    scores: NDArray[np.float32], parts: Sequence[Part[CalibrationRequest, Rows]]
) -> list[Rows | Exception]:
    """Calibrate the backbone's output (N, K) or (N, K + D): one call for each calibrator in the batch.

    A request whose rows cannot be calibrated gets an error; the others get their rows.
    """
    wide = scores.astype(np.float64)
    groups: dict[int, list[int]] = {}
    for position, part in enumerate(parts):
        groups.setdefault(id(part.context.served), []).append(position)
    outcomes: dict[int, Rows | Exception] = {}
    for members in groups.values():
        chosen = [parts[position] for position in members]
        rows = wide if len(groups) == 1 else np.concatenate([wide[p.start : p.stop] for p in chosen])
        outcomes.update(zip(members, _calibrate_together(rows, chosen), strict=True))
    return [outcomes[position] for position in range(len(parts))]


def _calibrate_together(
    scores: Float64Array, parts: Sequence[Part[CalibrationRequest, Rows]]
) -> list[Rows | Exception]:
    """Calibrate the consecutive rows of requests that share a calibrator."""
    stops = np.cumsum([part.stop - part.start for part in parts]).tolist()
    spans = list(zip([0, *stops], stops, strict=False))
    try:
        _check_backbone(scores)
        rows = _calibrate(scores, parts[0].context.served, _joint_box(parts, spans))
    except (InvalidLogits, BackboneFailed):
        return [
            _calibrate_alone(scores[a:b], part.context) for (a, b), part in zip(spans, parts, strict=True)
        ]
    return [rows.part(start, stop) for start, stop in spans]


def _calibrate_alone(scores: Float64Array, requested: CalibrationRequest) -> Rows | Exception:
    try:
        _check_backbone(scores)
        return calibrate(scores, requested)
    except BackboneFailed as error:
        return error
    except InvalidLogits as error:
        return BackboneFailed(f"The backbone's output cannot be calibrated: {error}")


def _check_backbone(scores: Float64Array) -> None:
    """Refuse output that is not finite: a defect of the model, not of a request."""
    if not np.isfinite(scores).all():
        raise BackboneFailed("The backbone returned NaN or infinity; see the server log.")


def _joint_box(
    parts: Sequence[Part[CalibrationRequest, Rows]], spans: Sequence[tuple[int, int]]
) -> Box | None:
    """Return the bounds of every row; one pair for all rows if there is one request."""
    bounds = [part.context.bounds for part in parts]
    if all(pair is None for pair in bounds):
        return None
    if len(bounds) == 1 and bounds[0] is not None:
        return bounds[0].lower, bounds[0].upper
    shape = spans[-1][1], parts[0].context.served.calibrator.num_classes
    lower, upper = np.zeros(shape), np.ones(shape)
    for pair, (start, stop) in zip(bounds, spans, strict=True):
        if pair is not None:
            lower[start:stop], upper[start:stop] = pair.lower, pair.upper
    return lower, upper


def _calibrate(scores: Float64Array, served: ServedCalibrator, box: Box | None) -> Rows:
    calibrator = served.calibrator
    plain = calibrator.plain if box is None and served.reads == "logits" else None
    num_classes = calibrator.num_classes
    logits = scores if scores.shape[1] == num_classes else np.ascontiguousarray(scores[:, :num_classes])
    effective: Box | tuple[float, float] | None
    try:
        if plain is not None:
            probabilities, mapped, sums, largest = plain.summarised(logits)
            effective, relaxed = plain.box, np.zeros(len(logits), np.bool_)
        else:
            read = scores[:, num_classes:] if served.reads == "features" else logits
            rows = calibrator.calibrate(read, box)
            probabilities, mapped, relaxed = rows.probabilities, rows.logits, rows.relaxed
            effective = None if _is_vacuous(rows.box) else rows.box
            sums, largest = np.add.reduce(probabilities, axis=1), probabilities.max(axis=1)
    except ValueError as error:
        finite(logits, "logits")
        raise InvalidLogits(f"The logits cannot be calibrated: {error}.") from error
    _check_sums(sums)
    if effective is None:
        return Rows(probabilities, logits, mapped, None, relaxed, largest)
    lower, upper = (np.broadcast_to(side, probabilities.shape) for side in effective)
    return Rows(probabilities, logits, mapped, (lower, upper), relaxed, largest)


def is_quick(requested: CalibrationRequest) -> bool:
    """Whether a request needs only the compiled loop over its rows."""
    served = requested.served
    return requested.bounds is None and served.reads == "logits" and served.calibrator.plain is not None


def _check_sums(sums: Float64Array) -> None:
    """Check that every row has the sum 1, which a NaN prevents too."""
    off = abs(sums.item() - 1.0) if len(sums) == 1 else np.abs(sums - 1.0).max()
    if not off <= SUM_TOLERANCE:
        raise InvalidLogits("The logits are too large: the calibrator's arithmetic overflows.")


def _is_vacuous(box: Box) -> bool:
    """Whether every probability satisfies a box, which is one for all rows and classes."""
    lower, upper = box
    return lower.ndim == 0 and upper.ndim == 0 and lower.item() <= 0.0 and upper.item() >= 1.0
