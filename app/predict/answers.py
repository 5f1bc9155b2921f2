"""The last step: calibrated rows become an answer, ranked and written as JSON or `.npy`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray

from boxcal.app.activation.active import ServedCalibrator
from boxcal.app.predict.options import Options
from boxcal.app.telemetry import STAGES

Float64Array = NDArray[np.float64]


FEW = 16
"""Up to so many classes are ranked in one pass over all."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """N calibrated samples of one request.

    Attributes
    ----------
    probabilities
        (N, K) float64.
    logits
        (N, K) float64, the backbone's.
    mapped
        (N, K) float64, the calibrated logits or others in their order: they order classes of equal
        probability.
    box
        (N, K) float64 each, the lower and upper effective bounds; None where they bound nothing.
    relaxed
        (N,) bool, where fitted bounds yielded to the request's.
    """

    probabilities: Float64Array
    logits: Float64Array
    mapped: Float64Array
    box: tuple[Float64Array, Float64Array] | None
    relaxed: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.probabilities)

    @property
    def relaxed_count(self) -> int:
        """How many samples had fitted bounds yield."""
        return int(np.count_nonzero(self.relaxed))

    def part(self, start: int, stop: int) -> Rows:
        """View some consecutive rows."""
        span = slice(start, stop)
        return Rows(
            self.probabilities[span],
            self.logits[span],
            self.mapped[span],
            None if self.box is None else (self.box[0][span], self.box[1][span]),
            self.relaxed[span],
        )

    @classmethod
    def join(cls, parts: Sequence[Rows]) -> Rows:
        """Put the rows of a request together again."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([p.probabilities for p in parts]),
            np.concatenate([p.logits for p in parts]),
            np.concatenate([p.mapped for p in parts]),
            cls._join_boxes(parts),
            np.concatenate([p.relaxed for p in parts]),
        )

    @staticmethod
    def _join_boxes(parts: Sequence[Rows]) -> tuple[Float64Array, Float64Array] | None:
        """Join boxes; a part that has none, for it shared its batch with no bounded request, gets (0, 1)."""
        if all(part.box is None for part in parts):
            return None
        boxes = [
            part.box or (np.zeros(part.probabilities.shape), np.ones(part.probabilities.shape))
            for part in parts
        ]
        return np.concatenate([lower for lower, _ in boxes]), np.concatenate([upper for _, upper in boxes])


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What a request gets: its rows, and by which calibrator.

    Attributes
    ----------
    seconds
        Time spent, by stage.
    """

    model: str
    labels: Sequence[str]
    served: ServedCalibrator
    rows: Rows
    options: Options
    seconds: Mapping[str, float]

    def confidences(self) -> list[float]:
        """Give the largest probability of each row."""
        if len(self.rows) == 1:
            row = self.rows.probabilities[0]
            return [row[row.argmax()].item()]
        values: list[float] = self.rows.probabilities.max(axis=1).tolist()
        return values

    def bound_hits(self) -> tuple[int, int]:
        """Count the classes that sit on a lower and on an upper bound that bounds anything."""
        if self.rows.box is None:
            return 0, 0
        lower, upper = self.rows.box
        at_lower = (lower > 0.0) & (self.rows.probabilities <= lower)
        at_upper = (upper < 1.0) & (self.rows.probabilities >= upper)
        return int(np.count_nonzero(at_lower)), int(np.count_nonzero(at_upper))

    def to_json(self) -> bytes:
        """Write the JSON document; every number in it reads back as the very float64 that was computed."""
        return orjson.dumps(
            {
                "model": self.model,
                "calibrator": {"version": self.served.version, "method": self.served.method},
                "bounds_relaxed": self.rows.relaxed_count > 0,
                "predictions": [self._prediction(row) for row in range(len(self.rows))],
                "timing_ms": {stage: round(self.seconds.get(stage, 0.0) * 1e6) / 1e3 for stage in STAGES},
            },
            option=orjson.OPT_SERIALIZE_NUMPY,
        )

    def _prediction(self, row: int) -> dict[str, Any]:
        probabilities = self.rows.probabilities[row]
        top = [
            {
                "label": self.labels[index],
                "index": index,
                "probability": probabilities[index].item(),
                "bound": self._held_by(row, index),
            }
            for index in rank(probabilities, self.rows.mapped[row], self.options.top_k)
        ]
        prediction: dict[str, Any] = {
            "label": top[0]["label"],
            "index": top[0]["index"],
            "probability": top[0]["probability"],
            "top": top,
        }
        if self.options.probabilities:
            prediction["probabilities"] = probabilities
        if self.options.logits:
            prediction["logits"] = self.rows.logits[row]
        return prediction

    def _held_by(self, row: int, index: int) -> Literal["lower", "upper"] | None:
        """Say which bound holds a probability, where one does that is not 0 or 1 anyway."""
        if self.rows.box is None:
            return None
        lower, upper = self.rows.box
        probability = self.rows.probabilities[row, index]
        if upper[row, index] < 1.0 and probability >= upper[row, index]:
            return "upper"
        if lower[row, index] > 0.0 and probability <= lower[row, index]:
            return "lower"
        return None


def rank(probabilities: Float64Array, mapped: Float64Array, count: int) -> list[int]:
    """Order the most probable classes; ties, which bounds create, go to the larger calibrated logit.

    Parameters
    ----------
    probabilities, mapped
        (K,) of one sample.
    count
        How many classes to list, K at most.
    """
    count = min(count, len(probabilities))
    if count <= FEW:
        few = np.empty(count, np.int64)
        _compiled_ranking()(probabilities, mapped, few)
        return few.tolist()
    least = np.partition(probabilities, -count)[-count]
    candidates = np.flatnonzero(probabilities >= least)
    order = np.lexsort((-mapped[candidates], -probabilities[candidates]))
    ranking: list[int] = candidates[order[:count]].tolist()
    return ranking


@cache
def _compiled_ranking() -> Callable[[Float64Array, Float64Array, NDArray[np.int64]], None]:
    from boxcal.calibrators.operator.ranking import most_probable  # noqa: PLC0415 - numba loads when needed

    return most_probable
