"""The feedback log in the registry's database: predictions that wait for labels, in the order they came.

Every prediction and every first label takes the next number of the log. A writer locks the counter, so that
numbers become visible in their order, and the monitor can fold the log up to any number. The methods block.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, ScalarSelect, bindparam, delete, func, insert, select, update

from boxcal.app.monitoring.records import ID, Event, Kept, Label, Outcome, Problem, time_of
from boxcal.app.registry.database import Database
from boxcal.app.registry.tables import feedback, feedback_logs

IDS_PER_QUERY = 500
ROWS_PER_INSERT = 100
KEPT_COLUMNS = ("id", "backbone_id", "seq", "version", "predicted_at", "logits")
SETTLE_SECONDS = 2.0
"""A label counts as known at a moment only this long after it: it is committed a little later than dated."""

_LABEL = (
    update(feedback)
    .where(feedback.c.backbone_id == bindparam("backbone"), feedback.c.id == bindparam("own"))
    .values(
        {
            name: bindparam(name)
            for name in ("label", "latest_label", "label_seq", "labelled_at", "propensity", "source")
        }
    )
)
_RELABEL = (
    update(feedback)
    .where(feedback.c.backbone_id == bindparam("backbone"), feedback.c.id == bindparam("own"))
    .values(latest_label=bindparam("latest_label"))
)


class FeedbackLog:
    """The log of one backbone.

    Parameters
    ----------
    database
        Holds it.
    backbone_id
        Selects the row of the backbone.
    max_rows
        Predictions to keep; the oldest are deleted.
    """

    def __init__(self, database: Database, backbone_id: ScalarSelect[int], max_rows: int) -> None:
        self._database = database
        self._backbone_id = backbone_id
        self._own = feedback.c.backbone_id == backbone_id
        self.max_rows = max_rows

    def write(
        self,
        predictions: Sequence[Kept],
        requests: Sequence[Sequence[Label]],
        *,
        may_be_stored: bool = False,
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
            written.add(written.missing(predictions) if may_be_stored else predictions)
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

    def after(self, connection: Connection, seq: int, limit: int) -> list[Event]:
        """Read the entries behind a number, predictions and first labels, at most `limit` of each."""
        predictions = self._page(connection, feedback.c.seq, seq, limit)
        labels = self._page(connection, feedback.c.label_seq, seq, limit)
        full = [page[-1].place for page in (predictions, labels) if len(page) == limit]
        events = [
            # A prediction that came together with its label is one entry, the label.
            *(_event(row, None) for row in predictions if row.label_seq != row.place),
            *(_event(row, row.label, is_prediction=row.seq == row.place) for row in labels),
        ]
        events.sort(key=lambda event: event.seq)
        return [event for event in events if event.seq <= min(full)] if full else events

    def matured(self, connection: Connection, seq: int, limit: int, maturity: float) -> list[Event]:
        """Read the predictions behind a number that are older than `maturity` seconds, in their order.

        A label belongs to its prediction if it arrived before that age.
        """
        now, events = time.time() - SETTLE_SECONDS, []
        for row in self._page(connection, feedback.c.seq, seq, limit):
            due = row.predicted_at + maturity
            if due > now and row.label_seq != row.place:
                break
            in_time = row.labelled_at is not None and row.labelled_at <= due
            events.append(_event(row, row.label if in_time else None))
        return events

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
            .where(self._own, answered, feedback.c.label.is_not(None), place <= seq)
            .order_by(place.desc())
            .limit(count)
        )
        return connection.execute(newest).all()[::-1]

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

    def _page(self, connection: Connection, place: Any, seq: int, limit: int) -> Sequence[Any]:
        columns = (
            feedback.c.seq, feedback.c.version, feedback.c.predicted_at, feedback.c.logits, feedback.c.label,
            feedback.c.label_seq, feedback.c.labelled_at, feedback.c.propensity,
        )  # fmt: skip
        page = select(place.label("place"), *columns).where(self._own, place > seq)
        return connection.execute(page.order_by(place).limit(limit)).all()

    def _prune(self, connection: Connection, rows: int) -> int:
        """Delete the oldest predictions beyond the limit, and return how many remain."""
        surplus = rows - self.max_rows
        if surplus <= 0:
            return rows
        last = select(feedback.c.seq).where(self._own).order_by(feedback.c.seq).offset(surplus - 1).limit(1)
        oldest = self._own & (feedback.c.seq <= last.scalar_subquery())
        return rows - connection.execute(delete(feedback).where(oldest)).rowcount


class _Transaction:
    """The entries that one transaction adds to the log."""

    def __init__(self, connection: Connection, backbone_id: int, seq: int) -> None:
        self._connection = connection
        self._backbone_id = backbone_id
        self._now = time.time()
        self._new: list[dict[str, Any]] = []
        self._labelled: dict[str, dict[str, Any]] = {}
        self._relabelled: dict[str, dict[str, Any]] = {}
        self._known: dict[str, tuple[int | None, int | None]] = {}
        self._oldest: float | None = None
        self.seq = seq
        self.added = 0

    def missing(self, predictions: Sequence[Kept]) -> list[Kept]:
        """Return the predictions that are not stored; those of one request are stored together."""
        first = [request.ids[0] for request in predictions]
        stored: set[str] = set()
        for start in range(0, len(first), IDS_PER_QUERY):
            found = select(feedback.c.id).where(
                feedback.c.backbone_id == self._backbone_id,
                feedback.c.id.in_(first[start : start + IDS_PER_QUERY]),
            )
            stored.update(self._connection.execute(found).scalars())
        return [request for request in predictions if request.ids[0] not in stored]

    def add(self, predictions: Iterable[Kept]) -> None:
        """Append predictions."""
        rows: list[tuple[Any, ...]] = []
        for request in predictions:
            for prediction, logits in zip(request.ids, request.stored(), strict=True):
                self.seq += 1
                rows.append((prediction, self._backbone_id, self.seq, request.version, request.at, logits))
        mark = "?" if self._connection.dialect.name == "sqlite" else "%s"
        row = f"({', '.join([mark] * len(KEPT_COLUMNS))})"
        head = f"INSERT INTO feedback ({', '.join(KEPT_COLUMNS)}) VALUES "  # noqa: S608 - no value in it
        # One statement for many rows: the driver lets other threads run at each, which costs more than a row.
        for start in range(0, len(rows), ROWS_PER_INSERT):
            some = rows[start : start + ROWS_PER_INSERT]
            values = tuple(value for one in some for value in one)
            self._connection.exec_driver_sql(head + ", ".join([row] * len(some)), values)
        self.added += len(rows)

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
            self._connection.execute(insert(feedback), self._new)
            self.added += len(self._new)
        if self._labelled:
            self._connection.execute(_LABEL, list(self._labelled.values()))
        if self._relabelled:
            self._connection.execute(_RELABEL, list(self._relabelled.values()))

    def _one(self, label: Label, outcome: Outcome) -> None:
        first = self._known.get(label.id)
        if first is None and label.logits is None:
            outcome.problems.append(self._missing(label))
        elif first is None or first[0] is None:
            self.seq += 1
            given = {
                "label": label.label,
                "latest_label": label.label,
                "label_seq": self.seq,
                "labelled_at": self._now,
                "propensity": label.propensity,
                "source": label.source,
            }
            if first is None and label.logits is not None:
                self._new.append(self._row(label.id, None, self._now, label.logits) | given)
            else:
                self._labelled[label.id] = {**self._key(label.id), **given}
            self._known[label.id] = label.label, label.label
            outcome.accepted += 1
        elif first[1] == label.label:
            outcome.duplicates += 1
        else:
            self._relabelled[label.id] = {**self._key(label.id), "latest_label": label.label}
            self._known[label.id] = first[0], label.label
            outcome.conflicts += 1

    def _key(self, own: str) -> dict[str, Any]:
        return {"backbone": self._backbone_id, "own": own}

    def _row(self, own: str, version: int | None, at: float, logits: bytes) -> dict[str, Any]:
        return {
            "id": own,
            "backbone_id": self._backbone_id,
            "seq": self.seq,
            "version": version,
            "predicted_at": at,
            "logits": logits,
        }

    def _look_up(self, labels: Iterable[Label]) -> None:
        possible = {label.id for label in labels if label.logits is not None or ID.fullmatch(label.id)}
        unseen = sorted(possible - self._known.keys())
        for start in range(0, len(unseen), IDS_PER_QUERY):
            found = select(feedback.c.id, feedback.c.label, feedback.c.latest_label).where(
                feedback.c.backbone_id == self._backbone_id,
                feedback.c.id.in_(unseen[start : start + IDS_PER_QUERY]),
            )
            for row in self._connection.execute(found):
                self._known[row.id] = row.label, row.latest_label

    def _missing(self, label: Label) -> Problem:
        """Say whether a prediction was deleted or never known."""
        if ID.fullmatch(label.id) and time_of(label.id) < self._oldest_kept():
            detail = f"Prediction {label.id} is older than the oldest one that is kept."
            return Problem(label.index, label.id, "expired", detail)
        return Problem(label.index, label.id[:64], "unknown", f"No prediction has the id {label.id!r:.100}.")

    def _oldest_kept(self) -> float:
        """Return the time of the oldest prediction kept; 0 if none was ever deleted."""
        if self._oldest is None:
            row = self._connection.execute(
                select(feedback.c.seq, feedback.c.predicted_at)
                .where(feedback.c.backbone_id == self._backbone_id)
                .order_by(feedback.c.seq)
                .limit(1)
            ).one_or_none()
            self._oldest = row.predicted_at if row is not None and row.seq > 1 else 0.0
        return self._oldest


def _event(row: Any, label: int | None, *, is_prediction: bool = True) -> Event:
    propensity = None if label is None else row.propensity
    logits = bytes(row.logits)
    return Event(row.place, row.version, row.predicted_at, logits, label, propensity, is_prediction)
