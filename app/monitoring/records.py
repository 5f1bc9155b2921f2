"""What passes between the routes, the feedback log and the monitor; none of it depends on the database."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.monitoring.stored_logits import HEADER, pack_into

ID = re.compile(r"[0-9a-f]{32}")
"""Of a prediction: the id of its block (24), and its place in it (8)."""
BLOCK_DIGITS = 24
BLOCK_ROWS = 1024
"""Most predictions of a block."""
_PLACES = tuple(f"{place:08x}" for place in range(BLOCK_ROWS))
NONE = -1
"""Stands in arrays for a version or a label that there is not."""

Reason = Literal["unknown", "expired", "malformed"]
Array = NDArray[Any]


class PredictionBlock:
    """Predictions that one process made one after another, and that are stored together.

    `id`: milliseconds since 1970 (12 hexadecimal digits), and random ones (12). `began`: when it was begun,
    in seconds since 1970.
    """

    def __init__(self, num_classes: int, most_rows: int = BLOCK_ROWS) -> None:
        self.began = time.time()
        self.id = f"{int(self.began * 1000):012x}{os.urandom(6).hex()}"
        self.rows = 0
        self._requests: list[tuple[int, int, float]] = []
        self._logits = np.empty((most_rows, HEADER + num_classes), np.int16)

    def add(self, version: int, logits: NDArray[np.float64], now: float) -> list[str]:
        """Add the predictions of a request; their logits are packed at once, while they are in the cache.

        `logits`: (N, K), of the backbone or the client; the block has room for them. `now`: when they were
        made, in seconds since 1970. Returns an id for each of them.
        """
        first, count, block = self.rows, len(logits), self.id
        self.rows = last = first + count
        self._requests.append((count, version, now))
        # Loops are compiled for arrays of one kind: those that lie row after row and can be written.
        pack_into(logits if logits.flags.carray else logits.copy(), self._logits[first:last])
        return [block + place for place in _PLACES[first:last]]

    def columns(self) -> dict[str, Array]:
        """Return what is stored: `versions` (int32), `moments` (float64), packed `logits` (int16)."""
        counts, versions, moments = zip(*self._requests, strict=True)
        return {
            "versions": np.repeat(np.array(versions, np.int32), counts),
            "moments": np.repeat(np.array(moments, np.float64), counts),
            "logits": self._logits[: self.rows],
        }


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """One item of `POST /feedback` that could be read."""

    index: int  # Position in the request
    id: str  # Of the prediction; for an item with logits, the digest of its key
    label: int  # Index of the true class
    # Probability with which this prediction was chosen to be labelled; None where it is not known
    propensity: float | None = None
    source: str | None = None  # Who or what labelled it
    logits: bytes | None = None  # As they are stored; only of a prediction that this service did not make


@dataclass(frozen=True, slots=True)
class ItemProblem:
    """Why an item was not used."""

    index: int
    id: str | None
    reason: Reason
    detail: str


@dataclass(slots=True)
class Outcome:
    """What became of the items of one request."""

    seq: int = 0  # Last number of the log once they were stored
    accepted: int = 0
    duplicates: int = 0  # Items whose label was known already
    # Items with another label than before: the tests keep the first label, refits use the latest
    conflicts: int = 0
    problems: list[ItemProblem] = field(default_factory=list)  # Items that are unknown, expired or malformed

    def count(self, reason: Reason) -> int:
        """Count the problems of one kind."""
        return sum(problem.reason == reason for problem in self.problems)


def entries(
    seq: Array,
    versions: Array,
    moments: Array,
    logits: Array,
    *,
    labels: Array | int = NONE,
    propensities: Array | float = 1.0,
    are_predictions: Array | bool = True,
) -> Array:
    """Return N entries of the log as the monitor folds them, a structured array (N,).

    `seq`: (N,) places in the log. `versions`: (N,) calibrators that answered; `NONE` where this service made
    no prediction. `moments`: (N,) when the predictions were made, in seconds since 1970. `logits`: (N, 4 + K)
    int16, as they are stored (`stored_logits.pack`). `labels`: (N,); `NONE` for a prediction whose label is
    not known at this place. `propensities`: (N,) with which the labelled ones were chosen; 1 where it is not
    known. `are_predictions`: (N,) whether the prediction itself is at this place, and not only its label.
    """
    columns = {
        "seq": ("i8", seq), "version": ("i4", versions), "moment": ("f8", moments), "label": ("i8", labels),
        "propensity": ("f8", propensities), "is_prediction": ("?", are_predictions),
    }  # fmt: skip
    kinds: list[Any] = [(name, kind) for name, (kind, _) in columns.items()]
    found = np.empty(len(seq), [*kinds, ("logits", "i2", logits.shape[1:])])
    for name, (_, values) in columns.items():
        found[name] = values
    found["logits"] = logits
    return found


def time_of(prediction_id: str) -> float:
    """Return when the block of an id was begun, in seconds since 1970."""
    return int(prediction_id[:12], 16) / 1000.0
