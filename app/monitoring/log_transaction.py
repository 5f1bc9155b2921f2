"""What one transaction adds to the feedback log: blocks of predictions, and labels of several requests."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sqlalchemy import Connection, bindparam, insert, select, update

from boxcal.app.monitoring.records import (
    BLOCK_DIGITS,
    ID,
    ItemProblem,
    Label,
    Outcome,
    PredictionBlock,
    time_of,
)
from boxcal.app.registry.tables import feedback, feedback_blocks

IDS_PER_QUERY = 500
BLOCKS_PER_QUERY = 16

_RELABEL = (
    update(feedback)
    .where(feedback.c.backbone_id == bindparam("backbone"), feedback.c.id == bindparam("key"))
    .values(latest_label=bindparam("latest_label"))
)


@dataclass(frozen=True, slots=True, eq=False)
class _Prediction:
    """One of a block: what is copied to the row of its label."""

    seq: int
    version: int | None
    at: float
    logits: bytes


class LogTransaction:
    """The entries that one transaction adds to the log."""

    def __init__(self, connection: Connection, backbone_id: int, seq: int) -> None:
        self._connection = connection
        self._backbone_id = backbone_id
        self._now = time.time()
        self._new: dict[str, dict[str, Any]] = {}
        self._relabelled: dict[str, dict[str, Any]] = {}
        self._latest: dict[str, int] = {}
        self._predicted: dict[str, _Prediction] = {}
        self._oldest: float | None = None
        self.seq = seq
        self.added = 0

    def missing(self, blocks: Sequence[PredictionBlock]) -> list[PredictionBlock]:
        """Return the blocks that are not stored."""
        stored: set[str] = set()
        for start in range(0, len(blocks), IDS_PER_QUERY):
            found = select(feedback_blocks.c.id).where(
                feedback_blocks.c.backbone_id == self._backbone_id,
                feedback_blocks.c.id.in_([block.id for block in blocks[start : start + IDS_PER_QUERY]]),
            )
            stored.update(self._connection.execute(found).scalars())
        return [block for block in blocks if block.id not in stored]

    def add(self, blocks: Iterable[PredictionBlock]) -> None:
        rows = []
        for block in blocks:
            self.seq += block.rows
            self.added += block.rows
            row = {"backbone_id": self._backbone_id, "id": block.id, "seq": self.seq, "row_count": block.rows}
            columns = block.columns().items()
            rows.append(row | {name: column.data.cast("B") for name, column in columns})
        if rows:
            self._connection.execute(insert(feedback_blocks), rows)

    def label(self, labels: Sequence[Label]) -> Outcome:
        """Append the labels of one request."""
        self._look_up(labels)
        outcome = Outcome()
        for label in labels:
            self._one(label, outcome)
        return outcome

    def flush(self) -> None:
        """Write the labels."""
        if self._new:
            self._connection.execute(insert(feedback), list(self._new.values()))
        if self._relabelled:
            self._connection.execute(_RELABEL, list(self._relabelled.values()))

    def _one(self, label: Label, outcome: Outcome) -> None:
        latest = self._latest.get(label.id)
        if latest == label.label:
            outcome.duplicates += 1
        elif latest is not None:
            key = {"backbone": self._backbone_id, "key": label.id}
            self._relabelled[label.id] = {**key, "latest_label": label.label}
            self._latest[label.id] = label.label
            outcome.conflicts += 1
        elif label.id in self._predicted or label.logits is not None:
            self.seq += 1
            self._new[label.id] = self._row(label)
            self._latest[label.id] = label.label
            outcome.accepted += 1
        else:
            outcome.problems.append(self._missing(label))

    def _row(self, label: Label) -> dict[str, Any]:
        prediction = self._predicted.get(label.id)
        if prediction is None:
            self.added += 1
            prediction = _Prediction(self.seq, None, self._now, label.logits or b"")
        return {
            "id": label.id,
            "backbone_id": self._backbone_id,
            "seq": prediction.seq,
            "version": prediction.version,
            "predicted_at": prediction.at,
            "logits": prediction.logits,
            "label": label.label,
            "latest_label": label.label,
            "label_seq": self.seq,
            "labelled_at": self._now,
            "propensity": label.propensity,
            "source": label.source,
        }

    def _look_up(self, labels: Iterable[Label]) -> None:
        possible = {label.id for label in labels if label.logits is not None or ID.fullmatch(label.id)}
        unseen = sorted(possible - self._latest.keys() - self._predicted.keys())
        for start in range(0, len(unseen), IDS_PER_QUERY):
            found = select(feedback.c.id, feedback.c.latest_label).where(
                feedback.c.backbone_id == self._backbone_id,
                feedback.c.id.in_(unseen[start : start + IDS_PER_QUERY]),
            )
            for row in self._connection.execute(found):
                self._latest[row.id] = row.latest_label
        places: dict[str, list[int]] = {}
        for key in unseen:
            if key not in self._latest and ID.fullmatch(key):
                places.setdefault(key[:BLOCK_DIGITS], []).append(int(key[BLOCK_DIGITS:], 16))
        wanted = list(places)
        for start in range(0, len(wanted), BLOCKS_PER_QUERY):
            blocks = select(feedback_blocks).where(
                feedback_blocks.c.backbone_id == self._backbone_id,
                feedback_blocks.c.id.in_(wanted[start : start + BLOCKS_PER_QUERY]),
            )
            for block in self._connection.execute(blocks):
                self._copy(block, places[block.id])

    def _copy(self, block: Any, places: Iterable[int]) -> None:
        """Copy predictions of a block."""
        versions, moments = np.frombuffer(block.versions, np.int32), np.frombuffer(block.moments, np.float64)
        logits = bytes(block.logits)
        size, first = len(logits) // block.row_count, block.seq - block.row_count + 1
        for place in places:
            if place < block.row_count:
                key, start = f"{block.id}{place:08x}", place * size
                self._predicted[key] = _Prediction(
                    first + place,
                    versions[place].item(),
                    moments[place].item(),
                    logits[start : start + size],
                )

    def _missing(self, label: Label) -> ItemProblem:
        """Say whether a prediction was deleted or never known."""
        if ID.fullmatch(label.id) and time_of(label.id) < self._oldest_kept():
            detail = f"Prediction {label.id} is older than the oldest one that is kept."
            return ItemProblem(label.index, label.id, "expired", detail)
        detail = f"No prediction has the id {label.id!r:.100}."
        return ItemProblem(label.index, label.id[:64], "unknown", detail)

    def _oldest_kept(self) -> float:
        """Return when the oldest block kept was begun; 0 if none was ever deleted."""
        if self._oldest is None:
            blocks = feedback_blocks.c
            oldest = (
                select(blocks.id, blocks.seq, blocks.row_count)
                .where(blocks.backbone_id == self._backbone_id)
                .order_by(blocks.seq)
                .limit(1)
            )
            row = self._connection.execute(oldest).one_or_none()
            began_later = row is not None and row.seq > row.row_count
            self._oldest = time_of(row.id) if row is not None and began_later else 0.0
        return self._oldest
