"""What the monitor decided, in the registry's database: written in the transaction of its state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import Connection, ScalarSelect, func, insert, or_, select, true, update

from boxcal.app.registry.database import Database
from boxcal.app.registry.tables import monitor_events, seconds_now, utc_now
from boxcal.calibrators.monitoring.decisions import LoopDecision

CLAIM_SECONDS = 120.0
"""After this long a delivery that another process claimed counts as failed."""


@dataclass(frozen=True, slots=True)
class StoredEvent:
    id: int
    kind: str  # That of the decision, or `acknowledged`
    created_at: datetime
    document: dict[str, Any]  # `sentence`, `version`, `labels` and `evidence`


class EventLog:
    """The events of one backbone."""

    def __init__(self, database: Database, backbone_id: ScalarSelect[int]) -> None:
        self._database = database
        self._backbone_id = backbone_id
        self._is_event = monitor_events.c.backbone_id == backbone_id

    def add(self, connection: Connection, decisions: Iterable[LoopDecision]) -> None:
        """Add decisions in the transaction that saves the state behind them."""
        for decision in decisions:
            document = {
                "sentence": decision.sentence,
                "version": decision.champion,
                "labels": decision.at,
                "evidence": dict(decision.evidence),
            }
            self.append(connection, decision.kind.value, document)

    def append(self, connection: Connection, kind: str, document: dict[str, Any]) -> None:
        values = {"kind": kind, "document": document, "created_at": utc_now()}
        connection.execute(insert(monitor_events).values(backbone_id=self._backbone_id, **values))

    def newest(self, limit: int, before: int | None = None) -> list[StoredEvent]:
        """At most `limit` events, newest first; only those older than the event `before`."""
        older = true() if before is None else monitor_events.c.id < before
        return self._read(older, limit, newest_first=True)

    def after(self, last: int, limit: int = 100) -> list[StoredEvent]:
        """At most `limit` events behind the event `last`, oldest first."""
        return self._read(monitor_events.c.id > last, limit, newest_first=False)

    def last(self) -> int:
        """Return the id of the newest event; 0 if there is none."""
        with self._database.read() as connection:
            newest = connection.execute(select(func.max(monitor_events.c.id)).where(self._is_event)).scalar()
            return newest or 0

    def claim(self, kinds: Iterable[str]) -> StoredEvent | None:
        """Claim the oldest undelivered event of these kinds; other processes then leave it alone."""
        now = seconds_now()
        free = or_(monitor_events.c.claimed_at.is_(None), monitor_events.c.claimed_at < now - CLAIM_SECONDS)
        open_ = (
            self._is_event & monitor_events.c.kind.in_(list(kinds)) & monitor_events.c.delivered_at.is_(None)
        )
        with self._database.read() as connection:
            if connection.execute(select(monitor_events.c.id).where(open_, free).limit(1)).first() is None:
                return None
        with self._database.write() as connection:
            oldest = select(func.min(monitor_events.c.id)).where(open_, free).scalar_subquery()
            claimed = connection.execute(
                update(monitor_events)
                .where(monitor_events.c.id == oldest, free)
                .values(claimed_at=now)
                .returning(*_columns)
            ).one_or_none()
        return None if claimed is None else StoredEvent(*claimed)

    def delivered(self, event: StoredEvent) -> None:
        """Record that an event was delivered."""
        with self._database.write() as connection:
            connection.execute(
                update(monitor_events)
                .where(monitor_events.c.id == event.id)
                .values(delivered_at=seconds_now())
            )

    def _read(self, condition: Any, limit: int, *, newest_first: bool) -> list[StoredEvent]:
        order = monitor_events.c.id.desc() if newest_first else monitor_events.c.id
        with self._database.read() as connection:
            rows = connection.execute(
                select(*_columns).where(self._is_event, condition).order_by(order).limit(limit)
            )
            return [StoredEvent(*row) for row in rows]


_columns = [monitor_events.c[name] for name in ("id", "kind", "created_at", "document")]
