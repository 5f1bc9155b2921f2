"""The feedback log in the registry's database: predictions that wait for labels, in the order they came.

Every prediction and every first label takes the next number of the log. A writer locks the counter, so that
numbers become visible in their order, and the monitor can fold the log up to any number. Predictions are
stored in blocks of many; one that gets its label is copied to a row of its own. The methods block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, ScalarSelect, delete, exists, func, literal, or_, select, union_all, update

from boxcal.app.monitoring.log_transaction import LogTransaction
from boxcal.app.monitoring.recent import Columns, RecentBlocks
from boxcal.app.monitoring.records import NONE, Block, Entries, Label, Outcome, predictions
from boxcal.app.registry.database import Database
from boxcal.app.registry.tables import feedback, feedback_blocks, feedback_logs
from boxcal.calibrators.monitoring.stored_logits import unpack

BLOCKS_PER_PAGE = 256
PRUNED_AT_ONCE = 1000
RECENT_BYTES = 32 * 2**20
"""Of predictions that this process stored and has not folded: it does not read them again."""


@dataclass(frozen=True, slots=True, eq=False)
class Page:
    """Some entries of the log, and whether there may be more behind them."""

    entries: Entries
    more: bool


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
    folds
        Whether this process soon reads what it stores.
    """

    def __init__(
        self, database: Database, backbone_id: ScalarSelect[int], max_rows: int, *, folds: bool = False
    ) -> None:
        self._database = database
        self._backbone_id = backbone_id
        self._own = feedback.c.backbone_id == backbone_id
        self._own_blocks = feedback_blocks.c.backbone_id == backbone_id
        self._recent = RecentBlocks(RECENT_BYTES if folds else 0)
        self.max_rows = max_rows

    def write(
        self,
        blocks: Sequence[Block],
        requests: Sequence[Sequence[Label]],
        *,
        may_be_stored: bool = False,
        forgotten: int = 0,
    ) -> list[Outcome]:
        """Store predictions, then the labels of several requests: one transaction.

        Parameters
        ----------
        may_be_stored
            Whether an earlier attempt may have stored some of the predictions.
        forgotten
            Older predictions that were too many to be kept: they take numbers of the log only.

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
        self._recent.add(blocks)
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

    def labelled_until(self, connection: Connection, seq: int, version: int, count: int) -> Sequence[Any]:
        """Read logits and latest labels of the last `count` labels of a version up to a place, in order."""
        place = feedback.c.label_seq
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
        return unpack(entries.logits[entries.versions == version][-count:])

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
        behind = select(blocks.seq, blocks.id, blocks.row_count).where(self._own_blocks, blocks.seq > seq)
        found = connection.execute(behind.order_by(blocks.seq).limit(BLOCKS_PER_PAGE)).all()
        if not found:
            return Entries.none(), None
        ends = np.cumsum([row.row_count for row in found])
        some = found[: int(np.searchsorted(ends, limit)) + 1]
        places = np.concatenate([np.arange(row.seq - row.row_count, row.seq) for row in some]) + 1
        columns = self._recent.take([row.id for row in some])
        if columns is None:
            columns = self._stored(connection, seq, some[-1].seq, len(places))
        made = predictions(places, *columns)
        is_full = len(some) < len(found) or len(found) == BLOCKS_PER_PAGE
        begin = int(np.searchsorted(places, seq, "right"))
        return made.take(slice(begin, None)), some[-1].seq if is_full else None

    def _stored(self, connection: Connection, seq: int, last: int, count: int) -> Columns:
        """Read the columns of the blocks between two numbers, which have `count` predictions."""
        blocks = feedback_blocks.c
        columns = select(blocks.versions, blocks.moments, blocks.logits)
        wanted = columns.where(self._own_blocks, blocks.seq > seq, blocks.seq <= last)
        versions, moments, logits = zip(*connection.execute(wanted.order_by(blocks.seq)), strict=True)
        return (
            np.frombuffer(b"".join(versions), np.int32),
            np.frombuffer(b"".join(moments), np.float64),
            np.frombuffer(b"".join(logits), np.int16).reshape(count, -1),
        )

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


def _entries(rows: Sequence[Any]) -> Entries:
    """Return the entries of labels, at their places."""
    if not rows:
        return Entries.none()
    return Entries(
        np.array([row.place for row in rows], np.int64),
        np.array([NONE if row.version is None else row.version for row in rows], np.int32),
        np.array([row.predicted_at for row in rows]),
        np.frombuffer(b"".join(row.logits for row in rows), np.int16).reshape(len(rows), -1),
        np.array([row.label for row in rows], np.int64),
        np.array([row.propensity or 1.0 for row in rows]),
        np.array([row.seq == row.place for row in rows]),
    )
