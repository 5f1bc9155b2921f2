"""The feedback log in the registry's database: predictions that wait for labels, in the order they came.

Every prediction and every first label takes the next number of the log. A writer locks the counter, so that
numbers become visible in their order, and the monitor can fold the log up to any number. Predictions are
stored in blocks of many; one that gets its label is copied to a row of its own. The methods block.
"""

from __future__ import annotations

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
    Block,
    Entries,
    Label,
    Outcome,
    Problem,
    predictions,
    time_of,
)
from boxcal.app.registry.database import Database
from boxcal.app.registry.tables import feedback, feedback_blocks, feedback_logs

IDS_PER_QUERY = 500
BLOCKS_PER_QUERY = 16
BLOCKS_PER_PAGE = 256
PRUNED_AT_ONCE = 1000
SETTLE_SECONDS = 2.0
"""A label counts as known at a moment only this long after it: it is committed a little later than dated."""

_RELABEL = (
    update(feedback)
    .where(feedback.c.backbone_id == bindparam("backbone"), feedback.c.id == bindparam("own"))
    .values(latest_label=bindparam("latest_label"))
)


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """Some entries of the log, and whether there may be more behind them."""

    entries: Entries
    more: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Prediction:
    """One of a block: what is copied to the row of its label."""

    seq: int
    version: int | None
    at: float
    logits: bytes


class FeedbackLog:
    """The log of one backbone.

    Parameters
    ----------
    database
        Holds it.
    backbone_id
        Selects the row of the backbone.
    max_rows
        Predictions to keep; the oldest are deleted, whole blocks of them.
    """

    def __init__(self, database: Database, backbone_id: ScalarSelect[int], max_rows: int) -> None:
        self._database = database
        self._backbone_id = backbone_id
        self._own = feedback.c.backbone_id == backbone_id
        self._own_blocks = feedback_blocks.c.backbone_id == backbone_id
        self.max_rows = max_rows

    def write(
        self, blocks: Sequence[Block], requests: Sequence[Sequence[Label]], *, may_be_stored: bool = False
    ) -> list[Outcome]:
        """Store predictions, then the labels of several requests: one transaction.

        Parameters
        ----------
        may_be_stored
            Whether an earlier attempt may have stored some of the predictions.

        Returns
        -------
        What became of the labels of each request.
        """
        with self._database.write() as connection:
            counter = connection.execute(
                select(feedback_logs)
                .where(feedback_logs.c.backbone_id == self._backbone_id)
                .with_for_update()
            ).one()
            written = _Transaction(connection, counter.backbone_id, counter.seq)
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

    def goes_on(self, connection: Connection, seq: int) -> bool:
        """Whether there are entries behind a number."""
        blocks = exists().where(self._own_blocks, feedback_blocks.c.seq > seq)
        labels = exists().where(self._own, feedback.c.label_seq > seq)
        return bool(connection.execute(select(or_(blocks, labels))).scalar_one())

    def after(self, connection: Connection, seq: int, limit: int, most_predictions: int = 0) -> Page:
        """Read the entries behind a number: at most `limit` first labels, and about as many predictions.

        Parameters
        ----------
        most_predictions
            Where more of them are wanted than of labels.
        """
        until, _ = self.position(connection)  # what is committed while this reads would have holes
        made, made_until = self._predictions(connection, seq, max(limit, most_predictions))
        rows = self._rows(connection, feedback.c.label_seq, seq, limit)
        labels_until = rows[-1].place if len(rows) == limit else None
        entries = Entries.join([made, _entries(rows)])
        full = [place for place in (made_until, labels_until) if place is not None]
        return Page(entries.until(min([until, *full])), bool(full))

    def matured(self, connection: Connection, seq: int, limit: int, maturity: float) -> Page:
        """Read the predictions behind a number that are older than `maturity` seconds, in their order.

        A label belongs to its prediction if it arrived before that age.
        """
        now = time.time() - SETTLE_SECONDS
        until, _ = self.position(connection)
        made, made_until = self._predictions(connection, seq, limit)
        rows = self._rows(connection, feedback.c.seq, seq, limit)
        rows_until = rows[-1].place if len(rows) == limit else None
        in_time = [
            row for row in rows if row.version is not None and row.labelled_at <= row.predicted_at + maturity
        ]
        places = np.searchsorted(made.seq, [row.place for row in in_time])
        for place, row in zip(places.tolist(), in_time, strict=True):
            if place < len(made) and made.seq[place] == row.place:
                made.labels[place] = row.label
                made.propensities[place] = row.propensity or 1.0
        # A prediction that came with its label is complete.
        entries = Entries.join([made, _entries([row for row in rows if row.version is None])])
        full = [place for place in (made_until, rows_until) if place is not None]
        entries = entries.until(min([until, *full]))
        young = (entries.moments + maturity > now) & (entries.versions != NONE)
        return Page(entries.take(slice(_first(young))), bool(full) and not young.any())

    def labelled_until(
        self, connection: Connection, seq: int, version: int, count: int, *, matured: bool
    ) -> Sequence[Any]:
        """Read the logits and latest labels of the last `count` labels of a version up to a place, in order.

        Parameters
        ----------
        matured
            Whether the place is that of the prediction, and not that of its label.
        """
        place = feedback.c.seq if matured else feedback.c.label_seq
        answered = feedback.c.version.is_(None) | (feedback.c.version == version)
        newest = (
            select(feedback.c.logits, feedback.c.latest_label)
            .where(self._own, answered, place <= seq)
            .order_by(place.desc())
            .limit(count)
        )
        return connection.execute(newest).all()[::-1]

    def newest(self, connection: Connection, version: int, count: int) -> NDArray[np.float64]:
        """Read the logits (n, K) of a version's predictions, at most `count`, among the newest ones."""
        blocks = feedback_blocks.c
        newest = select(blocks.seq, blocks.row_count).where(self._own_blocks).order_by(blocks.seq.desc())
        found = connection.execute(newest.limit(BLOCKS_PER_PAGE)).all()
        ends = np.cumsum([row.row_count for row in found])
        if not found:
            return np.empty((0, 0))
        first = found[min(int(np.searchsorted(ends, count)), len(found) - 1)]
        entries, _ = self._predictions(connection, first.seq - first.row_count, int(ends[-1]))
        logits: NDArray[np.float64] = entries.logits[entries.versions == version][-count:].astype(np.float64)
        return logits

    def sources(self, connection: Connection, limit: int = 20) -> dict[str, int]:
        """Count the labels kept by their source, the most frequent ones."""
        count = func.count()
        rows = connection.execute(
            select(feedback.c.source, count)
            .where(self._own, feedback.c.source.is_not(None))
            .group_by(feedback.c.source)
            .order_by(count.desc())
            .limit(limit)
        )
        return {row[0]: row[1] for row in rows}

    def _rows(self, connection: Connection, place: Any, seq: int, limit: int) -> Sequence[Any]:
        columns = (
            feedback.c.seq, feedback.c.version, feedback.c.predicted_at, feedback.c.logits, feedback.c.label,
            feedback.c.labelled_at, feedback.c.propensity,
        )  # fmt: skip
        page = select(place.label("place"), *columns).where(self._own, place > seq)
        return connection.execute(page.order_by(place).limit(limit)).all()

    def _predictions(self, connection: Connection, seq: int, limit: int) -> tuple[Entries, int | None]:
        """Read the predictions behind a number, and up to where, if there may be more."""
        blocks = feedback_blocks.c
        behind = select(blocks.seq, blocks.row_count).where(self._own_blocks, blocks.seq > seq)
        found = connection.execute(behind.order_by(blocks.seq).limit(BLOCKS_PER_PAGE)).all()
        if not found:
            return Entries.none(), None
        ends = np.cumsum([row.row_count for row in found])
        some = found[: int(np.searchsorted(ends, limit)) + 1]
        columns = select(blocks.versions, blocks.moments, blocks.logits)
        wanted = columns.where(self._own_blocks, blocks.seq > seq, blocks.seq <= some[-1].seq)
        rows = connection.execute(wanted.order_by(blocks.seq)).all()
        places = np.concatenate([np.arange(row.seq - row.row_count, row.seq) for row in some]) + 1
        made = predictions(
            places,
            np.frombuffer(b"".join(row.versions for row in rows), np.int32),
            np.frombuffer(b"".join(row.moments for row in rows), np.float64),
            np.frombuffer(b"".join(row.logits for row in rows), np.float16).reshape(len(places), -1),
        )
        is_full = len(some) < len(found) or len(found) == BLOCKS_PER_PAGE
        return made.take(slice(int(np.searchsorted(places, seq, "right")), None)), some[
            -1
        ].seq if is_full else None

    def _prune(self, connection: Connection, rows: int) -> int:
        """Delete the oldest predictions beyond the limit, and return how many remain."""
        blocks = feedback_blocks.c
        oldest = union_all(
            select(blocks.seq, blocks.row_count).where(self._own_blocks),
            select(feedback.c.seq, literal(1)).where(self._own, feedback.c.version.is_(None)),
        ).subquery()
        while rows > self.max_rows:
            found = connection.execute(select(oldest).order_by(oldest.c.seq).limit(PRUNED_AT_ONCE)).all()
            if not found:
                return 0
            freed = np.cumsum([row.row_count for row in found])
            enough = min(int(np.searchsorted(freed, rows - self.max_rows)), len(found) - 1)
            last = found[enough].seq
            rows -= int(freed[enough])
            connection.execute(delete(feedback_blocks).where(self._own_blocks, blocks.seq <= last))
            connection.execute(delete(feedback).where(self._own, feedback.c.seq <= last))
        return rows


class _Transaction:
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

    def missing(self, blocks: Sequence[Block]) -> list[Block]:
        """Return the blocks that are not stored."""
        stored: set[str] = set()
        for start in range(0, len(blocks), IDS_PER_QUERY):
            found = select(feedback_blocks.c.id).where(
                feedback_blocks.c.backbone_id == self._backbone_id,
                feedback_blocks.c.id.in_([block.id for block in blocks[start : start + IDS_PER_QUERY]]),
            )
            stored.update(self._connection.execute(found).scalars())
        return [block for block in blocks if block.id not in stored]

    def add(self, blocks: Iterable[Block]) -> None:
        """Append predictions."""
        rows = []
        for block in blocks:
            self.seq += block.rows
            self.added += block.rows
            own = {"backbone_id": self._backbone_id, "id": block.id, "seq": self.seq, "row_count": block.rows}
            rows.append(own | block.columns())
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
            key = {"backbone": self._backbone_id, "own": label.id}
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
        for own in unseen:
            if own not in self._latest and ID.fullmatch(own):
                places.setdefault(own[:BLOCK_DIGITS], []).append(int(own[BLOCK_DIGITS:], 16))
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
                own, start = f"{block.id}{place:08x}", place * size
                self._predicted[own] = _Prediction(
                    first + place,
                    versions[place].item(),
                    moments[place].item(),
                    logits[start : start + size],
                )

    def _missing(self, label: Label) -> Problem:
        """Say whether a prediction was deleted or never known."""
        if ID.fullmatch(label.id) and time_of(label.id) < self._oldest_kept():
            detail = f"Prediction {label.id} is older than the oldest one that is kept."
            return Problem(label.index, label.id, "expired", detail)
        return Problem(label.index, label.id[:64], "unknown", f"No prediction has the id {label.id!r:.100}.")

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


def _entries(rows: Sequence[Any]) -> Entries:
    """Return the entries of labels, at their places."""
    if not rows:
        return Entries.none()
    return Entries(
        np.array([row.place for row in rows], np.int64),
        np.array([NONE if row.version is None else row.version for row in rows], np.int32),
        np.array([row.predicted_at for row in rows]),
        np.frombuffer(b"".join(row.logits for row in rows), np.float16).reshape(len(rows), -1),
        np.array([row.label for row in rows], np.int64),
        np.array([row.propensity or 1.0 for row in rows]),
        np.array([row.seq == row.place for row in rows]),
    )


def _first(true: Any) -> int:
    """Return the index of the first true entry, or how many there are."""
    return int(true.argmax()) if true.any() else len(true)
