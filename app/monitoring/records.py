"""What passes between the routes, the feedback log and the monitor; none of it depends on the database."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ID = re.compile(r"[0-9a-f]{32}")
PROCESS = os.urandom(5).hex()
"""The part of ids that differs between processes."""
LARGEST = float(np.finfo(np.float16).max)

Reason = Literal["unknown", "expired", "malformed"]


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """The predictions of one request that wait for their labels.

    Attributes
    ----------
    ids
        N, one for each row.
    version
        The calibrator that made the probabilities.
    at
        When, in seconds since 1970.
    logits
        (N, K) float64, of the backbone or the client.
    """

    ids: list[str]
    version: int
    at: float
    logits: NDArray[np.float64]

    def stored(self) -> list[bytes]:
        """Return the logits of each row as they are stored: K float16."""
        small = np.clip(self.logits, -LARGEST, LARGEST).astype(np.float16)
        size, data = small.shape[1] * small.itemsize, small.tobytes()
        return [data[start : start + size] for start in range(0, len(data), size)]


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """One item of `POST /feedback` that could be read.

    Attributes
    ----------
    index
        Position in the request.
    id
        Of the prediction; for an item with logits, the digest of its key.
    label
        Index of the true class.
    propensity
        Probability with which this prediction was chosen to be labelled; None where it is not known.
    source
        Who or what labelled it.
    logits
        K numbers, float16; only of a prediction that this service did not make.
    """

    index: int
    id: str
    label: int
    propensity: float | None = None
    source: str | None = None
    logits: bytes | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an item was not used."""

    index: int
    id: str | None
    reason: Reason
    detail: str


@dataclass(slots=True)
class Outcome:
    """What became of the items of one request.

    Attributes
    ----------
    seq
        Last number of the log once they were stored.
    duplicates
        Items whose label was known already.
    conflicts
        Items with another label than before: the tests keep the first label, refits use the latest.
    problems
        Items that are unknown, expired or malformed.
    """

    seq: int = 0
    accepted: int = 0
    duplicates: int = 0
    conflicts: int = 0
    problems: list[Problem] = field(default_factory=list)

    def count(self, reason: Reason) -> int:
        """Count the problems of one kind."""
        return sum(problem.reason == reason for problem in self.problems)


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """One entry of the log, as the monitor folds it.

    Attributes
    ----------
    seq
        Its place.
    version
        The calibrator that answered; None where this service made no prediction.
    label
        None for a prediction whose label is not known at this place.
    is_prediction
        Whether the prediction itself is at this place, and not only its label.
    """

    seq: int
    version: int | None
    predicted_at: float
    logits: bytes
    label: int | None
    propensity: float | None
    is_prediction: bool


def new_ids(count: int, now: float) -> list[str]:
    """Make ids of 32 hexadecimal digits: milliseconds since 1970 (12), the process (10), a counter (10)."""
    start = f"{int(now * 1000):012x}{PROCESS}"
    return [f"{start}{next(_numbers):010x}" for _ in range(count)]


def time_of(prediction_id: str) -> float:
    """Return when an id was made, in seconds since 1970."""
    return int(prediction_id[:12], 16) / 1000.0


def kept(version: int, logits: NDArray[np.float64]) -> Kept:
    """Give ids to the predictions of a request."""
    now = time.time()
    return Kept(new_ids(len(logits), now), version, now, logits)


_numbers = count(1)
