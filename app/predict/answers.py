"""Writes the response of a request: its calibrated rows, ranked, as JSON or as `.npy`.

Lets the event loop run between the pieces of long work in another thread.

Python asks a thread for the interpreter only after another has waited for a whole switch interval. Each time
the thread releases it by itself, as numpy and compiled loops do, that wait begins again, and the thread takes
the interpreter back before any other wakes. So even work in small pieces can stop the event loop for 50 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from boxcal.app.predict.options import Options
from boxcal.app.registry.activator import ServedCalibrator
from boxcal.app.schemas.predictions import STAGES

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
PIECE_ROWS = 256
"""Predictions in one piece of a large response; the whole is never one string."""


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
        pieces = [_dumps(head)[:-1] + b',"predictions":[' + next(written)]
        while run := list(islice(written, PIECE_ROWS)):
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
    from boxcal.calibrators.operator.ranking import most_probable  # noqa: PLC0415 - imports numba

    return most_probable
