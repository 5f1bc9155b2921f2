"""The feedback log in the registry's database: predictions that wait for labels, in the order they came.

Every prediction and every first label takes the next number of the log. A writer locks the counter, so that
numbers become visible in their order, and the monitor can fold the log up to any number. Predictions are
stored in blocks of many; one that gets its label is copied to a row of its own. The methods block.

What one transaction adds to the feedback log: blocks of predictions, and labels of several requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import (
    Connection,
    ScalarSelect,
    bindparam,
    delete,
    exists,
    func,
    insert,
    literal,
    or_,
    select,
    union_all,
    update,
)

from boxcal.app.monitoring.records import (
    BLOCK_DIGITS,
    ID,
    NONE,
    Array,
    ItemProblem,
    Label,
    Outcome,
    PredictionBlock,
    entries,
    time_of,
)
from boxcal.app.registry.database import Database
from boxcal.app.registry.tables import feedback, feedback_blocks, feedback_logs
from boxcal.calibrators.monitoring.stored_logits import unpack

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
        if ID.fullmatch(label.id) and time_of(label.id) <= self._oldest_kept():
            detail = f"Prediction {label.id} is older than the oldest one that is kept."
            return ItemProblem(label.index, label.id, "expired", detail)
        detail = f"No prediction has the id {label.id!r:.100}."
        return ItemProblem(label.index, label.id[:64], "unknown", detail)

    def _oldest_kept(self) -> float:
        """Return when the oldest block kept was begun, as may be one that was deleted; -inf if none was."""
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
            self._oldest = time_of(row.id) if row is not None and began_later else -math.inf
        return self._oldest


BLOCKS_PER_PAGE = 256
PRUNED_AT_ONCE = 1000
MOST_SOURCES = 20


class FeedbackLog:
    """The log of one backbone."""

    def __init__(self, database: Database, backbone_id: ScalarSelect[int], max_rows: int) -> None:
        self._database = database
        self._backbone_id = backbone_id
        self._is_label = feedback.c.backbone_id == backbone_id
        self._is_block = feedback_blocks.c.backbone_id == backbone_id
        self.max_rows = max_rows

    def write(
        self,
        blocks: Sequence[PredictionBlock],
        requests: Sequence[Sequence[Label]],
        *,
        may_be_stored: bool = False,
        forgotten: int = 0,
    ) -> list[Outcome]:
        """Store predictions, then the labels of several requests: one transaction.

        `forgotten`: older predictions that were too many to be kept: they take numbers of the log only.
        Returns what became of the labels of each request.
        """
        with self._database.write() as connection:
            counter = connection.execute(
                select(feedback_logs)
                .where(feedback_logs.c.backbone_id == self._backbone_id)
                .with_for_update()
            ).one()
            written = LogTransaction(connection, counter.backbone_id, counter.seq + forgotten)
            written.add(written.missing(blocks) if may_be_stored else blocks)
            outcomes = [written.label(labels) for labels in requests]
            written.flush()
            rows = self._prune(connection, counter.row_count + written.added)
            connection.execute(
                update(feedback_logs)
                .where(feedback_logs.c.backbone_id == counter.backbone_id)
                .values(seq=written.seq, row_count=rows)
            )
            for outcome in outcomes:
                outcome.seq = written.seq
        return outcomes

    def position(self, connection: Connection) -> tuple[int, int]:
        """Return the last number of the log, and the number of predictions kept."""
        row = connection.execute(
            select(feedback_logs.c.seq, feedback_logs.c.row_count).where(
                feedback_logs.c.backbone_id == self._backbone_id
            )
        ).one()
        return row.seq, row.row_count

    def has_entries_after(self, connection: Connection, seq: int) -> bool:
        """Whether there are entries behind a number."""
        blocks = exists().where(self._is_block, feedback_blocks.c.seq > seq)
        labels = exists().where(self._is_label, feedback.c.label_seq > seq)
        return bool(connection.execute(select(or_(blocks, labels))).scalar_one())

    def after(
        self, connection: Connection, seq: int, limit: int, most_predictions: int = 0
    ) -> tuple[Array, bool]:
        """Read the entries behind a number: at most `limit` first labels, and about as many predictions.

        Returns the entries, and whether there may be more behind them.
        """
        until, _ = self.position(connection)  # what is committed while this reads would have holes
        predictions, predictions_until = self._predictions(connection, seq, max(limit, most_predictions))
        labels = self._labels(connection, seq, limit)
        ends = [] if predictions_until is None else [predictions_until]
        if len(labels) == limit:
            ends.append(int(labels["seq"][-1]))
        parts = [part for part in (predictions, labels) if len(part)]
        found = np.concatenate(parts) if parts else predictions
        found = found[np.argsort(found["seq"])]
        return found[: np.searchsorted(found["seq"], min([until, *ends]), "right")], bool(ends)

    def labelled_until(
        self, connection: Connection, seq: int, version: int, count: int
    ) -> tuple[Array, Array]:
        """Read the last `count` labels of a version up to a place, in order.

        Returns their logits (n, K), and the latest label (n,) of each.
        """
        answered = feedback.c.version.is_(None) | (feedback.c.version == version)
        newest = (
            select(feedback.c.logits, feedback.c.latest_label)
            .where(self._is_label, answered, feedback.c.label_seq <= seq)
            .order_by(feedback.c.label_seq.desc())
            .limit(count)
        )
        rows = connection.execute(newest).all()[::-1]
        return unpack(_packed([row.logits for row in rows])), np.array([row.latest_label for row in rows])

    def newest(self, connection: Connection, version: int, count: int) -> NDArray[np.float64]:
        """Read the logits (n, K) of the newest `count` predictions of a version, or of all that are kept.

        Blocks are read page by page, the newest first: at low traffic a block has a single prediction.
        """
        blocks = feedback_blocks.c
        newest = select(blocks.seq, blocks.versions).where(self._is_block).order_by(blocks.seq.desc())
        page = connection.execute(newest.limit(BLOCKS_PER_PAGE)).all()
        parts: list[Array] = []
        missing = count
        while missing > 0 and page:
            chosen: dict[int, Array] = {}  # places in blocks, by the number of the block
            rows = last = 0
            for block in page:
                places, last = np.flatnonzero(np.frombuffer(block.versions, np.int32) == version), block.seq
                if len(places):
                    chosen[last] = places[-missing:]
                    missing -= len(places)
                    rows += len(block.versions) // 4
                if missing <= 0 or rows >= count:  # what is read at once stays small
                    break
            wanted = select(blocks.seq, blocks.row_count, blocks.logits).order_by(blocks.seq.desc())
            for row in connection.execute(wanted.where(self._is_block, blocks.seq.in_(chosen))):
                packed = np.frombuffer(row.logits, np.int16).reshape(row.row_count, -1)
                parts.append(packed[chosen[row.seq]])
            page = connection.execute(newest.where(blocks.seq < last).limit(BLOCKS_PER_PAGE)).all()
        return unpack(np.concatenate(parts[::-1])) if parts else np.empty((0, 0))

    def sources(self, connection: Connection) -> dict[str, int]:
        """Count the labels kept by their source, the most frequent ones."""
        count = func.count()
        rows = connection.execute(
            select(feedback.c.source, count)
            .where(self._is_label, feedback.c.source.is_not(None))
            .group_by(feedback.c.source)
            .order_by(count.desc())
            .limit(MOST_SOURCES)
        )
        return {row[0]: row[1] for row in rows}

    def _labels(self, connection: Connection, seq: int, limit: int) -> Array:
        """Read the first labels behind a number."""
        page = select(feedback).where(self._is_label, feedback.c.label_seq > seq)
        rows = connection.execute(page.order_by(feedback.c.label_seq).limit(limit)).all()
        return entries(
            np.array([row.label_seq for row in rows], np.int64),
            np.array([NONE if row.version is None else row.version for row in rows], np.int32),
            np.array([row.predicted_at for row in rows]),
            _packed([row.logits for row in rows]),
            labels=np.array([row.label for row in rows], np.int64),
            propensities=np.array([row.propensity or 1.0 for row in rows]),
            are_predictions=np.array([row.seq == row.label_seq for row in rows], np.bool_),
        )

    def _predictions(self, connection: Connection, seq: int, limit: int) -> tuple[Array, int | None]:
        """Read the predictions behind a number, and up to where, if there may be more."""
        blocks = feedback_blocks.c
        behind = select(blocks.seq, blocks.row_count).where(self._is_block, blocks.seq > seq)
        found = connection.execute(behind.order_by(blocks.seq).limit(BLOCKS_PER_PAGE)).all()
        if not found:
            nothing = np.empty(0)
            return entries(nothing, nothing, nothing, np.empty((0, 0))), None
        some = found[: int(np.searchsorted(np.cumsum([row.row_count for row in found]), limit)) + 1]
        last = some[-1].seq
        columns = select(blocks.seq, blocks.row_count, blocks.versions, blocks.moments, blocks.logits)
        wanted = columns.where(self._is_block, blocks.seq > seq, blocks.seq <= last).order_by(blocks.seq)
        ends, counts, versions, moments, logits = zip(*connection.execute(wanted), strict=True)
        places = (
            np.concatenate([np.arange(*span) for span in zip(np.subtract(ends, counts), ends, strict=True)])
            + 1
        )
        made = entries(
            places,
            np.frombuffer(b"".join(versions), np.int32),
            np.frombuffer(b"".join(moments), np.float64),
            np.frombuffer(b"".join(logits), np.int16).reshape(len(places), -1),
        )
        is_full = len(some) < len(found) or len(found) == BLOCKS_PER_PAGE
        return made[np.searchsorted(places, seq, "right") :], last if is_full else None

    def _prune(self, connection: Connection, rows: int) -> int:
        """Delete the oldest predictions beyond the limit, and return how many remain."""
        blocks = feedback_blocks.c
        oldest = union_all(
            select(blocks.seq, blocks.row_count).where(self._is_block),
            select(feedback.c.seq, literal(1)).where(self._is_label, feedback.c.version.is_(None)),
        ).subquery()
        while rows > self.max_rows:
            found = connection.execute(select(oldest).order_by(oldest.c.seq).limit(PRUNED_AT_ONCE)).all()
            if not found:
                return 0
            freed = np.cumsum([row.row_count for row in found])
            enough = min(int(np.searchsorted(freed, rows - self.max_rows)), len(found) - 1)
            last = found[enough].seq
            rows -= int(freed[enough])
            connection.execute(delete(feedback_blocks).where(self._is_block, blocks.seq <= last))
            connection.execute(delete(feedback).where(self._is_label, feedback.c.seq <= last))
        return rows


def _packed(rows: Sequence[bytes]) -> Array:
    """Join packed logits (n, 4 + K)."""
    width = len(rows[0]) // 2 if rows else 0
    return np.frombuffer(b"".join(map(bytes, rows)), np.int16).reshape(len(rows), width)
