"""The monitor in the database: one state for all replicas, folded forward by whichever has the lock.

A step reads the entries behind the state, folds them and saves the state, the events and the place up to
which the log is folded in one transaction. A process that is killed leaves either the old or the new state,
and replicas that share PostgreSQL never fold an entry twice.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from sqlalchemy import Connection, insert, select, text, update

from boxcal.app.http.problems import RegistryUnavailable, UnusableCalibrator
from boxcal.app.monitoring.events import EventLog, StoredEvent
from boxcal.app.monitoring.fold import ActiveVersion, Matrix, MonitorFold, document_of, meaning_of
from boxcal.app.monitoring.log import FeedbackLog
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.records import Activation
from boxcal.app.registry.store import Registry
from boxcal.app.registry.tables import monitors, utc_now

if TYPE_CHECKING:
    from boxcal.app.observability.telemetry import Telemetry

logger = logging.getLogger("boxcal")

POLL_SECONDS = 2.0
PAUSE_SECONDS = 0.2
"""Between two steps, so that one folds many entries."""
LABELS_PER_STEP = 1000
NUMBERS_PER_STEP = 2**22
"""Of logits; predictions cost less than labels."""
MONITOR_LOCK = 0x6D6F6E69
"""First key of the advisory lock; the second is the id of the backbone."""
KEPT_ROWS = 4096
"""A row is asked for when it is predicted, when it is labelled, and by each part of the fold."""

Result = TypeVar("Result")


def active_version_of(registry: Registry, activator: Activator, activation: Activation) -> ActiveVersion:
    """Describe the calibrator of an activation; blocks."""
    report = _report(registry, activation.version)
    after = report.get("reliability", {}).get("after")
    return ActiveVersion(
        version=activation.version,
        method=activation.method,
        activation=activation.id,
        class_prior=_class_prior(report),
        validation_gap=float(after["accuracy"] - after["mean_confidence"]) if after else 0.0,
        reads_logits=activator.load(activation.version).reads == "logits",
    )


def class_prior_of(registry: Registry, version: int) -> tuple[Matrix | None, float]:
    """Return the mean answer (K,) of a version to the data of its fit, and the effective number of samples.

    None and infinity if the data are not known. Blocks.
    """
    report = _report(registry, version)
    return _class_prior(report), report.get("effective_samples", report.get("samples", math.inf))


def _class_prior(report: dict[str, Any]) -> Matrix | None:
    return np.array(report["class_prior"], np.float64) if "class_prior" in report else None


def _report(registry: Registry, version: int) -> dict[str, Any]:
    """Return the report of a version; {} if it has none or was pruned."""
    try:
        return registry.report(version)
    except UnusableCalibrator:
        return {}


class VersionAnswers:
    """Gives the probabilities of any version of the registry, without request bounds; blocks.

    The answer to a row is the same to the last bit whatever the other rows are, so that a log may be folded
    in parts of any size. The compiled loops go row by row; a product of matrices may not.
    """

    def __init__(self, activator: Activator) -> None:
        self._activator = activator
        self._kept: OrderedDict[tuple[int, bytes], Matrix] = OrderedDict()

    def __call__(self, version: int, logits: Matrix) -> Matrix:
        """Return the probabilities (N, K) of a version for logits (N, K)."""
        calibrator, rows = self._activator.load(version).calibrator, np.ascontiguousarray(logits)
        if calibrator.plain is not None:
            return calibrator.plain(rows)[0]
        answers = []
        for row in rows:
            key = version, row.tobytes()
            if key not in self._kept:
                self._kept[key] = calibrator(row[None])[0]
            answers.append(self._kept[key])
            if len(self._kept) > KEPT_ROWS:
                self._kept.popitem(last=False)
        return np.stack(answers)


@dataclass(eq=False)
class Monitor:
    """Folds the feedback log; its methods but `run` and `wake` block.

    `document`: the newest document that this process knows; None before the first step.
    """

    registry: Registry
    activator: Activator
    log: FeedbackLog
    events: EventLog
    telemetry: Telemetry
    _: KW_ONLY
    classes: Sequence[str]
    refits: bool
    folds: bool = True

    def __post_init__(self) -> None:
        self._answers = VersionAnswers(self.activator)
        self._is_monitor = monitors.c.backbone_id == self.registry.backbone_id
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._closing = False
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self.document: dict[str, Any] | None = None

    def wake(self) -> None:
        """Fold soon: entries were added."""
        self._wake.set()

    async def run(self, after_step: Callable[[], Any]) -> None:
        """Fold whenever entries were added, and every 2 s, until cancelled."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), POLL_SECONDS)
            woken = self._wake.is_set()
            self._wake.clear()
            place = self._place()
            try:
                if woken or place is None or place != self._seen:
                    while more := await self.registry.run(self.step):
                        pass
                    if more is not None:
                        self._seen = place
                self.publish()
                await after_step()
                await asyncio.sleep(PAUSE_SECONDS)
            except RegistryUnavailable:
                await asyncio.sleep(POLL_SECONDS)  # the registry logs that it is lost, once

    def _place(self) -> tuple[int, int, int] | None:
        """Return what the registry said last about the log, the state and the activation."""
        last = self.registry.snapshots.last
        return None if last is None else (last.seq, last.revision, last.activation)

    def publish(self) -> None:
        """Show the state in the metrics, and wake those who wait for a change."""
        if self.document is not None:
            self.telemetry.monitored(self.document)
        waiting, self._changed = self._changed, asyncio.Event()
        waiting.set()

    async def follow(self, last: int | None) -> AsyncGenerator[StoredEvent]:
        """Yield the events behind the event `last`, or from now on, until the service stops."""
        if last is None:
            last = await self.registry.run(self.events.last)
        while not self._closing:
            changed = self._changed
            for event in await self.registry.run(self.events.after, last):
                last = event.id
                yield event
            await changed.wait()

    def close(self) -> None:
        """End the streams of events."""
        self._closing = True
        self.publish()

    def step(self) -> bool | None:
        """Fold the next entries; returns whether there may be more, None if another process has the lock."""
        activation = self.activator.active.activation
        with self._lock:
            with self.registry.database.read() as connection:
                row = self._row(connection)
                if row is not None:
                    self.document = row.document
                    if row.activation >= activation and not self.log.has_entries_after(connection, row.seq):
                        return False
            if not self.folds:
                return False
            with self._locked(wait=False) as found:
                if found is None:
                    return None
                fold, connection = found
                rows = max(1, NUMBERS_PER_STEP // len(self.classes))
                labels = min(LABELS_PER_STEP, rows)
                entries, more = self.log.after(connection, fold.seq, labels, rows)
                self._forget_unusable(fold, connection)
                if decisions := fold.fold(entries):
                    self.events.add(connection, decisions)
            return more

    def _forget_unusable(self, fold: MonitorFold, connection: Connection) -> None:
        """End the comparisons with versions that were pruned, and record it."""
        challenger = fold.loop.challenger
        for version in [*fold.loop.earlier_versions, *([] if challenger is None else [challenger])]:
            try:
                self.activator.load(version)
            except UnusableCalibrator:
                self.events.add(connection, fold.loop.forget(version))

    def change(self, work: Callable[[MonitorFold, Connection], Result]) -> Result:
        """Change the state in a transaction of its own; returns what `work` returns."""
        with self._lock, self._locked(wait=True) as found:
            if found is None:  # `wait` means that the lock was got
                raise AssertionError("the monitor is not locked")
            return work(*found)

    def forget(self, version: int) -> None:
        """End the comparison with a version that was pruned, and record it."""
        self.change(lambda fold, connection: self.events.add(connection, fold.loop.forget(version)))

    def acknowledge(self, note: str | None) -> None:
        """Begin the test anew, decline a proposal, and record it."""

        def work(fold: MonitorFold, connection: Connection) -> None:
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            self.events.add(connection, fold.acknowledge(now))
            reason = f": {note}" if note else ""
            document = {
                "sentence": f"Acknowledged{reason}. The test of calibration begins anew.",
                "version": fold.active.version,
                "labels": fold.loop.seen,
                "evidence": {"note": note},
            }
            self.events.append(connection, "acknowledged", document)

        self.change(work)

    def current(self) -> dict[str, Any]:
        """Read the document, with its meaning and with what the log has."""
        with self.registry.database.read() as connection:
            row = self._row(connection)
            seq, rows = self.log.position(connection)
            document: dict[str, Any] = {} if row is None else dict(row.document)
            if not self.refits:
                document["refit_in"] = None  # it may have been written while there were refits
            log = {"seq": seq, "rows": rows, "sources": self.log.sources(connection)}
            return {**document, "sentence": meaning_of(document), "log": log}

    @contextmanager
    def _locked(self, *, wait: bool) -> Iterator[tuple[MonitorFold, Connection] | None]:
        """Lock the state, and save it at the end of the block; None if another process has the lock."""
        activation = self.registry.activations.active()
        with self.registry.database.write() as connection:
            backbone_id = connection.execute(select(self.registry.backbone_id)).scalar_one()
            if not self.registry.database.is_sqlite and not _lock(connection, backbone_id, wait=wait):
                yield None
                return
            row = self._row(connection, monitors.c.state)
            fold = None if row is None else self._read(row)
            if fold is None:
                active = active_version_of(self.registry, self.activator, activation)
                fold = MonitorFold(len(self.classes), self._answers, active, refits=self.refits)
                fold.seq = 0 if row is None else row.seq
            elif activation.id > row.activation:
                active = active_version_of(self.registry, self.activator, activation)
                self.events.add(connection, [fold.activated(active)])
            yield fold, connection
            document = document_of(fold, self.classes)
            values = {
                "seq": fold.seq,
                "revision": 1 if row is None else row.revision + 1,
                "activation": fold.active.activation,
                "state": fold.to_bytes(),
                "document": document,
                "updated_at": utc_now(),
            }
            if row is None:
                connection.execute(insert(monitors).values(backbone_id=backbone_id, **values))
            else:
                connection.execute(update(monitors).where(self._is_monitor).values(**values))
        self.document = document

    def _read(self, row: Any) -> MonitorFold | None:
        """Read the state; None where it cannot be, so that the test begins anew with the next label."""
        try:
            return MonitorFold.from_bytes(
                bytes(row.state), len(self.classes), self._answers, refits=self.refits
            )
        except ValueError as error:
            logger.warning("%s. Another release may have written it; the monitor begins anew.", error)
            return None

    def _row(self, connection: Connection, *more: Any) -> Any:
        columns = (monitors.c.seq, monitors.c.revision, monitors.c.activation, monitors.c.document, *more)
        return connection.execute(select(*columns).where(self._is_monitor)).one_or_none()


def _lock(connection: Connection, backbone_id: int, *, wait: bool) -> bool:
    keys = {"monitor": MONITOR_LOCK, "backbone": backbone_id}
    if wait:
        connection.execute(text("SELECT pg_advisory_xact_lock(:monitor, :backbone)"), keys)
        return True
    got = connection.execute(text("SELECT pg_try_advisory_xact_lock(:monitor, :backbone)"), keys)
    return bool(got.scalar_one())
