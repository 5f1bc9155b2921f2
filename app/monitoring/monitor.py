"""The monitor in the database: one state for all replicas, folded forward by whichever holds the lock.

A turn reads the entries behind the state, folds them and saves the state, the events and the place up to
which the log is folded in one transaction. A process that is killed leaves either the old or the new state,
and replicas that share PostgreSQL never fold an entry twice.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, insert, select, text, update

from boxcal.app.http.problems import RegistryUnavailable, UnusableCalibrator
from boxcal.app.monitoring.active_version import active_version_of
from boxcal.app.monitoring.answers import Answers
from boxcal.app.monitoring.events import EventLog, MonitorEvent
from boxcal.app.monitoring.fold import MonitorFold
from boxcal.app.monitoring.log import FeedbackLog, Page
from boxcal.app.monitoring.sentence import sentence
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.glance import Glance
from boxcal.app.registry.store import Registry
from boxcal.app.registry.tables import monitors, utc_now

if TYPE_CHECKING:
    from boxcal.app.observability.telemetry import Telemetry

logger = logging.getLogger("boxcal")

POLL_SECONDS = 2.0
PAUSE_SECONDS = 0.2
"""Between two looks at the log, so that a turn folds many entries."""
LABELS_PER_TURN = 1000
NUMBERS_PER_TURN = 2**22
"""Of logits; predictions cost less than labels."""
MONITOR_LOCK = 0x6D6F6E69
"""First key of the advisory lock; the second is the id of the backbone."""


@dataclass(slots=True, eq=False)
class _Held:
    """The monitor, locked in a transaction."""

    connection: Connection
    backbone_id: int
    fold: MonitorFold


class Monitor:
    """Folds the feedback log; its methods but `run` and `wake` block.

    Parameters
    ----------
    registry, activator
        Hold the calibrators.
    log, events
        What is folded, and what was decided.
    telemetry
        Shows the alarms and the expected accuracy.
    classes
        The K class names.
    refits
        Whether to ask for refits.
    folds
        Whether this process folds the log; otherwise it shows what another one folds.

    Attributes
    ----------
    document
        How the monitor stood when this process last looked; None before the first turn.
    changed
        Set, and replaced, whenever this process saw a new state.
    """

    def __init__(
        self,
        registry: Registry,
        activator: Activator,
        log: FeedbackLog,
        events: EventLog,
        telemetry: Telemetry,
        *,
        classes: Sequence[str],
        refits: bool,
        folds: bool = True,
    ) -> None:
        self._folds = folds
        self._registry = registry
        self._activator = activator
        self._log = log
        self._telemetry = telemetry
        self._classes = classes
        self._refits = refits
        self._answers = Answers(activator)
        self._lock = threading.Lock()
        self._cached: tuple[int, MonitorFold] | None = None
        self._seen = 0
        self._looked: tuple[int, int, int] | None = None
        self._closing = False
        self._wake = asyncio.Event()
        self.events = events
        self.document: dict[str, Any] | None = None
        self.changed = asyncio.Event()

    def wake(self) -> None:
        """Fold soon: entries were added."""
        self._wake.set()

    async def run(self, after_turn: Callable[[], Any]) -> None:
        """Fold whenever entries were added, and every 2 s, until cancelled.

        Parameters
        ----------
        after_turn
            Awaited after the log was folded to its end.
        """
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_SECONDS)
            woken = self._wake.is_set()
            self._wake.clear()
            glance = self._registry.glances.last
            try:
                if woken or self._is_behind():
                    while await self._registry.run(self.turn):
                        pass
                    self._looked = None if glance is None else self._place(glance)
                self.publish()
                await after_turn()
                await asyncio.sleep(PAUSE_SECONDS)
            except RegistryUnavailable:
                await asyncio.sleep(POLL_SECONDS)  # the registry logs that it is lost, once

    def _is_behind(self) -> bool:
        """Whether the last look at the registry shows what this process has not seen."""
        glance = self._registry.glances.last
        return glance is None or self._place(glance) != self._looked

    @staticmethod
    def _place(glance: Glance) -> tuple[int, int, int]:
        return glance.seq, glance.revision, glance.activation

    def publish(self) -> None:
        """Show the state in the metrics, and wake those who wait for a change."""
        if self.document is not None:
            self._telemetry.monitored(self.document)
        waiting, self.changed = self.changed, asyncio.Event()
        waiting.set()

    async def follow(self, last: int | None) -> AsyncIterator[MonitorEvent]:
        """Yield the events behind the event `last`, or from now on, until the service stops."""
        if last is None:
            last = await self._registry.run(self.events.last)
        while not self._closing:
            changed = self.changed
            for event in await self._registry.run(self.events.after, last):
                last = event.id
                yield event
            await changed.wait()

    def close(self) -> None:
        """End the streams of events."""
        self._closing = True
        self.publish()

    def turn(self) -> bool:
        """Fold the next entries; returns whether there may be more."""
        activation = self._activator.active.activation
        with self._lock:
            with self._registry.database.read() as connection:
                row = self._row(connection)
                if row is not None:
                    self._look(row.revision, row.document)
                    if row.activation >= activation and not self._log.goes_on(connection, row.seq):
                        return False
            if not self._folds:
                return False
            with self._held(wait=False) as held:
                if held is None:
                    return False
                page = self._next(held.connection, held.fold.seq)
                for version in held.fold.versions():
                    try:
                        self._activator.load(version)
                    except UnusableCalibrator:
                        held.fold.forget(version)
                self.events.add(held.connection, held.fold.fold(page.entries))
            return page.more

    def change(self, work: Callable[[MonitorFold, Connection], Any]) -> Any:
        """Change the state in a transaction of its own; returns what `work` returns."""
        with self._lock, self._held(wait=True) as held:
            if held is None:  # `wait` means that the lock is held
                raise AssertionError("the monitor is not locked")
            return work(held.fold, held.connection)

    def acknowledge(self, note: str | None) -> dict[str, Any]:
        """Begin the test anew, decline a proposal, and record it; returns the document."""

        def work(fold: MonitorFold, connection: Connection) -> dict[str, Any]:
            now = _now()
            self.events.add(connection, fold.acknowledge(now))
            sentence = f"Acknowledged{f': {note}' if note else ''}. The test of calibration begins anew."
            version, labels = fold.active.version, fold.loop.seen
            document = {
                "sentence": sentence,
                "version": version,
                "labels": labels,
                "evidence": {"note": note},
            }
            self.events.append(connection, "acknowledged", document)
            return fold.document(self._classes)

        found: dict[str, Any] = self.change(work)
        return found

    def current(self) -> dict[str, Any]:
        """Read the document, with what the log holds."""
        with self._registry.database.read() as connection:
            row = self._row(connection)
            seq, rows = self._log.position(connection)
            document: dict[str, Any] = {} if row is None else dict(row.document)
            held = {"seq": seq, "rows": rows, "sources": self._log.sources(connection)}
            return {**document, "sentence": sentence(document), "log": held}

    # -- the transaction -------------------------------------------------------------------------------------

    @contextmanager
    def _held(self, *, wait: bool) -> Iterator[_Held | None]:
        """Lock the state, and save it at the end of the block; None if another process holds the lock."""
        activation = self._registry.activations.active()
        revision, fold = 0, None
        cached, self._cached = self._cached, None  # only a commit makes it valid again
        with self._registry.database.write() as connection:
            backbone_id = connection.execute(select(self._registry.backbone_id)).scalar_one()
            if not self._registry.database.is_sqlite and not _lock(connection, backbone_id, wait=wait):
                yield None
                return
            row = self._row(connection)
            if row is None:
                active = active_version_of(self._registry, self._activator, activation)
                fold = MonitorFold(len(self._classes), self._answers, active, refits=self._refits)
            else:
                revision = row.revision
                fold = cached[1] if cached is not None and cached[0] == revision else self._load(connection)
                if activation.id > row.activation:
                    active = active_version_of(self._registry, self._activator, activation)
                    self.events.add(connection, [fold.activated(active)])
            yield _Held(connection, backbone_id, fold)
            document = fold.document(self._classes)
            values = {
                "seq": fold.seq,
                "revision": revision + 1,
                "activation": fold.active.activation,
                "state": fold.to_bytes(),
                "document": document,
                "updated_at": utc_now(),
            }
            if row is None:
                connection.execute(insert(monitors).values(backbone_id=backbone_id, **values))
            else:
                connection.execute(
                    update(monitors).where(monitors.c.backbone_id == backbone_id).values(**values)
                )
        self._cached = revision + 1, fold
        self._look(revision + 1, document)

    def _load(self, connection: Connection) -> MonitorFold:
        state = connection.execute(
            select(monitors.c.state).where(monitors.c.backbone_id == self._registry.backbone_id)
        ).scalar_one()
        return MonitorFold.from_bytes(bytes(state), len(self._classes), self._answers, refits=self._refits)

    def _look(self, revision: int, document: dict[str, Any]) -> None:
        if revision != self._seen:
            self._seen, self.document = revision, document

    def _row(self, connection: Connection) -> Any:
        columns = (monitors.c.seq, monitors.c.revision, monitors.c.activation, monitors.c.document)
        own = monitors.c.backbone_id == self._registry.backbone_id
        return connection.execute(select(*columns).where(own)).one_or_none()

    def _next(self, connection: Connection, seq: int) -> Page:
        rows = max(1, NUMBERS_PER_TURN // len(self._classes))
        return self._log.after(connection, seq, min(LABELS_PER_TURN, rows), rows)


def _lock(connection: Connection, backbone_id: int, *, wait: bool) -> bool:
    keys = {"monitor": MONITOR_LOCK, "backbone": backbone_id}
    if wait:
        connection.execute(text("SELECT pg_advisory_xact_lock(:monitor, :backbone)"), keys)
        return True
    got = connection.execute(text("SELECT pg_try_advisory_xact_lock(:monitor, :backbone)"), keys)
    return bool(got.scalar_one())


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
