"""From samples to calibrated rows, as the batcher runs it on a batch, and from rows to the response.

Most calibrators read logits. `fc` and `ta` read the features that the backbone's last layer takes; `nc` adds
a constant to the samples before the backbone.

Long responses are written in pieces, between which the event loop can run. Python asks a thread for the
interpreter only after another has waited for a whole switch interval. Each time the thread releases it by
itself, as numpy and compiled loops do, that wait begins again, and the thread takes the interpreter back
before any other wakes. So even work in small pieces can stop the event loop for 50 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from boxcal.app.http.problems import BackboneFailed, InvalidLogits, InvalidParameter
from boxcal.app.predict.lanes import Part
from boxcal.app.predict.options import Options, RequestBounds
from boxcal.app.registry.activator import ServedCalibrator
from boxcal.app.schemas.predictions import STAGES
from boxcal.app.tables.arrays import finite
from boxcal.calibrators.array_calibrator import Box
from boxcal.models.backends.backbone import Backbone, FeatureBackbone

PAUSE_SECONDS = 1e-5
"""Linux adds some 50 microseconds; pieces take about a millisecond."""


def release_interpreter() -> None:
    """Release the interpreter for long enough that a thread that waits for it gets it."""
    time.sleep(PAUSE_SECONDS)


Float64Array = NDArray[np.float64]

COMPILED_TOP_K = 16
"""The compiled loop ranks up to this many classes; it is quadratic in their number."""
PIECE_NUMBERS = 16_384
"""A response with more numbers is written prediction by prediction, so that other threads can run between."""
PIECE_ROWS, PIECE_BYTES = 256, 2**20
"""Predictions in one piece of a large response, fewer where they have more bytes; the whole is never one
string."""


@dataclass(slots=True, eq=False)
class Rows:
    """N calibrated samples of one request; nothing changes them. A frozen dataclass is slower to make."""

    probabilities: Float64Array  # (N, K) float64
    logits: Float64Array  # (N, K) float64, from the backbone or the client
    mapped: Float64Array  # (N, K) float64, the calibrated logits; they order classes of equal probability
    # (N, K) float64 each, the lower and upper effective bounds; None if every probability satisfies them
    box: tuple[Float64Array, Float64Array] | None
    relaxed: NDArray[np.bool_]  # (N,) bool, whether fitted bounds were relaxed
    largest: Float64Array  # (N,) float64, the largest probability of each sample

    def __len__(self) -> int:
        return len(self.probabilities)

    def part(self, start: int, stop: int) -> Rows:
        """View some consecutive rows."""
        span = slice(start, stop)
        box = None if self.box is None else (self.box[0][span], self.box[1][span])
        return Rows(
            self.probabilities[span],
            self.logits[span],
            self.mapped[span],
            box,
            self.relaxed[span],
            self.largest[span],
        )

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """Concatenate the rows of a request that was split over batches."""
        if len(parts) == 1:
            return parts[0]
        box = None
        if any(part.box for part in parts):
            # A batch in which no request had bounds has no box; (0, 1) has the same meaning.
            boxes = [p.box or (np.zeros_like(p.logits), np.ones_like(p.logits)) for p in parts]
            box = np.concatenate([b[0] for b in boxes]), np.concatenate([b[1] for b in boxes])
        return cls(
            np.concatenate([p.probabilities for p in parts]),
            np.concatenate([p.logits for p in parts]),
            np.concatenate([p.mapped for p in parts]),
            box,
            np.concatenate([p.relaxed for p in parts]),
            np.concatenate([p.largest for p in parts]),
        )


@dataclass(eq=False)
class CalibratedAnswer:
    """The result of one request; `schemas.predictions.Answer` defines the document that it becomes."""

    model: str
    labels: Sequence[str]
    served: ServedCalibrator
    rows: Rows
    options: Options
    seconds: Mapping[str, float]  # Duration of each stage
    ids: Sequence[str] | None = None  # One for each row, if the request asked for feedback
    # Whether the text of each row was truncated; None for other inputs
    truncated: Sequence[bool] | None = None

    def bound_hits(self) -> tuple[int, int]:
        """Count the probabilities that are equal to a lower bound above 0 and to an upper bound below 1."""
        if self.rows.box is None:
            return 0, 0
        lower, upper = self.rows.box
        at_lower = (lower > 0.0) & (self.rows.probabilities <= lower)
        at_upper = (upper < 1.0) & (self.rows.probabilities >= upper)
        return int(np.count_nonzero(at_lower)), int(np.count_nonzero(at_upper))

    def to_json(self) -> list[bytes]:
        """Write the JSON document, in pieces; every number in it reads back as the same float64."""
        head = {
            "model": self.model,
            "calibrator": {"version": self.served.version, "method": self.served.method},
            "bounds_relaxed": np.count_nonzero(self.rows.relaxed) > 0,
        }
        timing = {stage: round(self.seconds.get(stage, 0.0) * 1e6) / 1e3 for stage in STAGES}
        rows = map(self._prediction, range(len(self.rows)))
        if self.rows.probabilities.size <= PIECE_NUMBERS:
            return [_dumps({**head, "predictions": list(rows), "timing_ms": timing})]
        written = map(_dumps, rows)
        first = next(written)
        pieces = [_dumps(head)[:-1] + b',"predictions":[' + first]
        step = max(1, min(PIECE_ROWS, PIECE_BYTES // len(first)))
        while run := list(islice(written, step)):
            pieces.append(b"," + b",".join(run))
            release_interpreter()
        return [*pieces, b'],"timing_ms":' + _dumps(timing) + b"}"]

    def _prediction(self, row: int) -> dict[str, Any]:
        probabilities = self.rows.probabilities[row]
        top = [
            {
                "label": self.labels[index],
                "index": index,
                "probability": probabilities.item(index),
                "bound": self.bound_hit(row, index),
            }
            for index in rank(probabilities, self.rows.mapped[row], self.options.top_k)
        ]
        first = top[0]
        prediction: dict[str, Any] = {
            "label": first["label"],
            "index": first["index"],
            "probability": first["probability"],
            "top": top,
        }
        if self.ids is not None:
            prediction["id"] = self.ids[row]
        if self.options.probabilities:
            prediction["probabilities"] = probabilities
        if self.options.logits:
            prediction["logits"] = self.rows.logits[row]
        if self.options.explain:
            prediction["explain"] = self._explain(row)
        if self.truncated is not None and self.truncated[row]:
            prediction["truncated"] = True
        return prediction

    @cached_property
    def _explanation(self) -> tuple[Float64Array, Float64Array, Float64Array]:
        """Return the mapped logits (N, K) and the fitted bounds (1 or N, 1 or K)."""
        calibrator = self.served.calibrator
        if calibrator.reads == "features":  # the mapped logits cannot be computed from logits
            return self.rows.mapped, np.zeros((1, 1)), np.ones((1, 1))
        calibrated = calibrator.calibrate(self.rows.logits)
        lower, upper = map(np.atleast_2d, calibrated.box)
        return calibrated.logits, lower, upper

    def _explain(self, row: int) -> dict[str, Any]:
        mapped, lower, upper = self._explanation
        bounds = (bound[row if len(bound) > 1 else 0] for bound in (lower, upper))
        low, high = (bound.item() if bound.size == 1 else bound for bound in bounds)
        return {"logits": mapped[row], "lower": low, "upper": high}

    def bound_hit(self, row: int, index: int) -> Literal["lower", "upper"] | None:
        """Return which bound the probability is equal to, except 0 and 1, which bound every probability."""
        if self.rows.box is None:
            return None
        lower, upper = self.rows.box
        probability = self.rows.probabilities[row, index]
        if upper[row, index] < 1.0 and probability >= upper[row, index]:
            return "upper"
        if lower[row, index] > 0.0 and probability <= lower[row, index]:
            return "lower"
        return None


def _dumps(document: Any) -> bytes:
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def rank(probabilities: Float64Array, mapped: Float64Array, count: int) -> list[int]:
    """Return the most probable classes; classes of equal probability are ordered by calibrated logit.

    `probabilities`, `mapped`: (K,) of one sample.
    """
    count = min(count, len(probabilities))
    if count <= COMPILED_TOP_K:
        top = np.empty(count, np.int64)
        _compiled_ranking()(probabilities, mapped, top)
        return top.tolist()
    least = np.partition(probabilities, -count)[-count]
    candidates = np.flatnonzero(probabilities >= least)
    order = np.lexsort((-mapped[candidates], -probabilities[candidates]))
    ranking: list[int] = candidates[order[:count]].tolist()
    return ranking


@cache
def _compiled_ranking() -> Callable[[Float64Array, Float64Array, NDArray[np.int64]], None]:
    from boxcal.calibrators.operator.cpu_loops import most_probable  # noqa: PLC0415 - imports numba

    return most_probable


SUM_TOLERANCE = 1e-6
"""Largest accepted distance of a row's sum of probabilities from 1."""

Samples = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationRequest:
    """The calibrator and the bounds that one request asks for."""

    served: ServedCalibrator
    bounds: RequestBounds | None

    @property
    def needs_solver(self) -> bool:
        """Whether the softmax alone cannot answer."""
        plain = self.served.calibrator.plain
        return self.bounds is not None or plain is None or plain.box is not None


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
        if not isinstance(self._backbone, FeatureBackbone) or self._backbone.head is None:
            raise InvalidParameter(
                f"The backbone {self._backbone.name} has no features, which the active calibrator reads."
            )
        features = self._backbone.features(batch)
        weight, bias = self._backbone.head
        return np.concatenate([np.asarray(features @ weight.T + bias), np.asarray(features)], axis=1)


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
