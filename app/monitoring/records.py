"""What passes between the routes, the feedback log and the monitor; none of it depends on the database."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
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


class Block:
    """Predictions that one process made one after another, and that are stored together.

    Parameters
    ----------
    num_classes
        K.
    most_rows
        Predictions that it has room for.

    Attributes
    ----------
    id
        Milliseconds since 1970 (12 hexadecimal digits), and random ones (12).
    began
        When it was begun, in seconds since 1970.
    rows
        How many predictions it has.
    """

    def __init__(self, num_classes: int, most_rows: int = BLOCK_ROWS) -> None:
        self.began = time.time()
        self.id = f"{int(self.began * 1000):012x}{os.urandom(6).hex()}"
        self.rows = 0
        self._requests: list[tuple[int, int, float]] = []
        self._logits = np.empty((most_rows, HEADER + num_classes), np.int16)

    def add(self, version: int, logits: NDArray[np.float64], now: float) -> list[str]:
        """Add the predictions of a request.

        They are rounded at once, while they are in the processor's cache.

        Parameters
        ----------
        version
            The calibrator that made the probabilities.
        logits
            (N, K), of the backbone or the client; the block has room for them.
        now
            When they were made, in seconds since 1970.

        Returns
        -------
        An id for each of them.
        """
        first, count, block = self.rows, len(logits), self.id
        self.rows = last = first + count
        self._requests.append((count, version, now))
        # Loops are compiled for arrays of one kind: those that lie row after row and can be written.
        pack_into(logits if logits.flags.carray else logits.copy(), self._logits[first:last])
        return [block + place for place in _PLACES[first:last]]

    @property
    def nbytes(self) -> int:
        """Bytes that it has reserved."""
        return self._logits.nbytes

    def columns(self) -> tuple[Array, Array, Array]:
        """Return what is stored: versions (int32), times (float64), packed logits (int16)."""
        counts, versions, moments = zip(*self._requests, strict=True)
        return (
            np.repeat(np.array(versions, np.int32), counts),
            np.repeat(np.array(moments, np.float64), counts),
            self._logits[: self.rows],
        )


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
        As they are stored; only of a prediction that this service did not make.
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
class Entries:
    """N entries of the log, in its order, as the monitor folds them.

    Attributes
    ----------
    seq
        (N,) int64, their places.
    versions
        (N,) int32, the calibrators that answered; `NONE` where this service made no prediction.
    moments
        (N,) float64, when the predictions were made, in seconds since 1970.
    logits
        (N, 4 + K) int16, as they are stored (`stored_logits.pack`).
    labels
        (N,) int64; `NONE` for a prediction whose label is not known at this place.
    propensities
        (N,) float64 with which the labelled ones were chosen; 1 where it is not known.
    are_predictions
        (N,) bool, whether the prediction itself is at this place, and not only its label.
    """

    seq: Array
    versions: Array
    moments: Array
    logits: Array
    labels: Array
    propensities: Array
    are_predictions: Array

    def __len__(self) -> int:
        return len(self.seq)

    def take(self, which: Array | slice) -> Entries:
        """Return some of them."""
        return Entries(*(column[which] for column in self._columns()))

    def until(self, place: int) -> Entries:
        """Return those up to a place."""
        return self.take(slice(int(np.searchsorted(self.seq, place, "right"))))

    def _columns(self) -> list[Array]:
        return [getattr(self, column.name) for column in fields(self)]

    @classmethod
    def join(cls, parts: Iterable[Entries]) -> Entries:
        """Merge entries by their places."""
        some = [part for part in parts if len(part)]
        if len(some) < 2:
            return some[0] if some else cls.none()
        columns = zip(*(part._columns() for part in some), strict=True)
        joined = cls(*map(np.concatenate, columns))
        return joined.take(np.argsort(joined.seq))

    @classmethod
    def none(cls) -> Entries:
        """Return no entry."""
        seq, versions = np.empty(0, np.int64), np.empty(0, np.int32)
        return predictions(seq, versions, np.empty(0), np.empty((0, 0), np.int16))


def predictions(seq: Array, versions: Array, moments: Array, logits: Array) -> Entries:
    """Return entries without labels."""
    count = len(seq)
    labels, ones = np.full(count, NONE, np.int64), np.ones(count)
    return Entries(seq, versions, moments, logits, labels, ones, np.ones(count, np.bool_))


def time_of(own: str) -> float:
    """Return when the block of an id was begun, in seconds since 1970."""
    return int(own[:12], 16) / 1000.0
