"""The record of fits: one row for each, from the moment its upload is accepted.

Several processes may share it. A fit belongs to its owner (a process) and its attempt: every change names
both and must hit exactly one unfinished row, otherwise it is rolled back. So a process that was paused, and
whose fit was interrupted or adopted meanwhile, can neither change nor activate anything. All times are the
database's.

A fit whose validation set is in shared storage is adopted by another process when its owner stops; any other
fit is interrupted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Interval,
    ScalarSelect,
    delete,
    false,
    func,
    insert,
    literal,
    select,
    update,
)

from boxcal.app.http.problems import FitLost, FitNotFound
from boxcal.app.registry import audit
from boxcal.app.registry.audit import SERVICE, Action, Caller
from boxcal.app.registry.database import Database, Leader
from boxcal.app.registry.records import UNFINISHED, ActivatePolicy, Decision, FitRecord, FitState
from boxcal.app.registry.tables import fits, utc_now

CANCELLED = "Cancelled on request."
INTERRUPTED = "The service stopped before the fit was over; upload the validation set again."
SILENT_AFTER = timedelta(seconds=60)
"""After this time without a sign of life of its owner, a fit is interrupted."""
ADOPTED_AFTER = timedelta(seconds=6)
"""The same for adoption, which loses nothing if the owner was only paused."""
GIVEN_UP_AFTER = timedelta(days=1)
"""After this time a fit that no process adopts is interrupted: none has its shared directory or backbone."""
MAX_ATTEMPTS = 3
NOBODY = ""
"""The owner of a fit that a process released when it stopped."""
KEPT = 1000

_columns = [fits.c[field.name] for field in fields(FitRecord)]
_unfinished = fits.c.state.in_(UNFINISHED)
_adoptable = fits.c.shared & (fits.c.attempt < MAX_ATTEMPTS) & ~fits.c.cancel_requested


class FitLog:
    """The fits of one backbone.

    `owner`: names this process; only the fits that it added or adopted are its own.
    """

    def __init__(self, database: Database, backbone_id: ScalarSelect[int], owner: str) -> None:
        self._database = database
        self._backbone_id = backbone_id
        self.owner = owner

    def add(
        self,
        fit_id: str,
        method: str,
        activate: ActivatePolicy,
        samples: int,
        *,
        budget_seconds: float | None = None,
        shared: bool = False,
        owned: bool = True,
        caller: Caller = SERVICE,
    ) -> FitRecord:
        """Record an accepted upload as queued; of the fits that have ended, only the newest `KEPT` remain."""
        ended = (fits.c.backbone_id == self._backbone_id) & ~_unfinished
        outdated = select(fits.c.id).where(ended).order_by(fits.c.created_at.desc()).offset(KEPT - 1)
        with self._database.write() as connection:
            connection.execute(delete(fits).where(fits.c.id.in_(outdated)))
            connection.execute(
                insert(fits).values(
                    id=fit_id,
                    backbone_id=self._backbone_id,
                    owner=self.owner if owned else NOBODY,
                    state=FitState.QUEUED,
                    method=method,
                    activate=activate,
                    samples=samples,
                    progress=0.0,
                    stage="waiting",
                    created_at=utc_now(),
                    seen_at=utc_now(),
                    shared=shared,
                    budget_seconds=budget_seconds,
                )
            )
            details = {"method": method, "activate": activate.value, "samples": samples}
            audit.append(connection, caller, Action.FIT, f"fit {fit_id}", **details)
            if not owned:
                self._database.notify(connection)
            return self._get(connection, fit_id)

    def get(self, fit_id: str) -> FitRecord:
        with self._database.read() as connection:
            return self._get(connection, fit_id)

    def list(self, limit: int, before: str | None = None) -> list[FitRecord]:
        """At most `limit`, newest first; only fits older than the fit `before`."""
        newest = select(*_columns).where(fits.c.backbone_id == self._backbone_id)
        if before is not None:
            moment = select(fits.c.created_at).where(fits.c.id == before).scalar_subquery()
            older = (fits.c.created_at == moment) & (fits.c.id > before)
            newest = newest.where((fits.c.created_at < moment) | older)
        with self._database.read() as connection:
            rows = connection.execute(newest.order_by(fits.c.created_at.desc(), fits.c.id).limit(limit))
            return [_record(row._mapping) for row in rows]

    def start(self, fit: FitRecord) -> FitRecord:
        """Mark it running, as a new attempt."""
        return self._set(
            fit, attempt=fit.attempt + 1, state=FitState.RUNNING, stage="starting", started_at=utc_now()
        )

    def advance(self, fit: FitRecord, progress: float, stage: str) -> FitRecord:
        """Record its progress, 0 to 1, which also says that its process is alive."""
        return self._set(fit, progress=progress, stage=stage)

    def end(self, fit: FitRecord, state: FitState, error: str, canceller: Caller | None = None) -> FitRecord:
        """Mark it `failed`, `cancelled` or `interrupted`, with the reason.

        `canceller`: who cancelled it, for the audit log; None if nobody did, or if `request_cancel` recorded
        it.
        """
        with self._database.write() as connection:
            self._change(connection, fit, state=state, error=error, finished_at=utc_now())
            if canceller is not None:
                audit.append(connection, canceller, Action.CANCEL, f"fit {fit.id}")
            return self._get(connection, fit.id)

    def succeed(
        self,
        connection: Connection,
        fit: FitRecord,
        version: int,
        decision: Decision,
        warnings: Sequence[dict[str, Any]],
    ) -> None:
        """Mark it succeeded in the transaction that adds its calibrator."""
        self._change(
            connection,
            fit,
            state=FitState.SUCCEEDED,
            progress=1.0,
            stage="done",
            calibrator=version,
            activated=decision.activate,
            decision=decision.why,
            warnings=warnings,
            finished_at=utc_now(),
        )

    def keep_alive(self) -> None:
        """Record that this process is alive and still works on its fits."""
        with self._database.write() as connection:
            connection.execute(
                update(fits).where(fits.c.owner == self.owner, _unfinished).values(seen_at=utc_now())
            )

    def request_cancel(self, fit_id: str, caller: Caller) -> bool:
        """Ask the owner of a fit, which may be another process, to cancel it, unless the fit has ended.

        A fit without an owner is cancelled at once; returns whether it was.
        """
        asked = (fits.c.id == fit_id) & _unfinished
        ending = {"state": FitState.CANCELLED, "error": CANCELLED, "finished_at": utc_now()}
        with self._database.write() as connection:
            requested = connection.execute(update(fits).where(asked).values(cancel_requested=True)).rowcount
            ended = connection.execute(update(fits).where(asked, fits.c.owner == NOBODY).values(**ending))
            if requested:
                audit.append(connection, caller, Action.CANCEL, f"fit {fit_id}")
                self._database.notify(connection)
        return ended.rowcount > 0

    def cancel_requests(self) -> Sequence[str]:
        """Return the ids of this process's fits that shall be cancelled."""
        asked = select(fits.c.id).where(fits.c.owner == self.owner, _unfinished, fits.c.cancel_requested)
        with self._database.read() as connection:
            return connection.execute(asked).scalars().all()

    def release(self, fit: FitRecord) -> FitRecord:
        """Give up the ownership, so that another process adopts the fit at once."""
        return self._set(fit, wakes=True, state=FitState.QUEUED, stage="waiting", owner=NOBODY)

    def adopt(self, living: Collection[str]) -> tuple[FitRecord, str, float | None] | None:
        """Take over the oldest fit that its owner released, or whose owner is dead, as one that waits.

        Returns the fit, its former owner and its `budget_seconds`; None if there is no such fit.
        """
        silent = self._silent(living, ADOPTED_AFTER)
        adoptable = _unfinished & _adoptable & ((fits.c.owner == NOBODY) | silent)
        oldest = (
            select(fits.c.id, fits.c.owner, fits.c.budget_seconds)
            .where(adoptable, fits.c.backbone_id == self._backbone_id)
            .order_by(fits.c.created_at)
            .limit(1)
            .with_for_update(skip_locked=True)
        )
        with self._database.write() as connection:
            row = connection.execute(oldest).one_or_none()
            if row is None:
                return None
            connection.execute(
                update(fits)
                .where(fits.c.id == row.id)
                .values(owner=self.owner, state=FitState.QUEUED, stage="waiting", seen_at=utc_now())
            )
            return self._get(connection, row.id), row.owner, row.budget_seconds

    def waiting(self) -> int:
        """Count the fits without an owner."""
        counted = select(func.count()).select_from(fits).where(_unfinished, fits.c.owner == NOBODY)
        with self._database.read() as connection:
            return int(connection.execute(counted).scalar_one())

    def unfinished(self) -> set[str]:
        """Return the ids of all fits that have not ended."""
        with self._database.read() as connection:
            return set(connection.execute(select(fits.c.id).where(_unfinished)).scalars())

    def interrupt_abandoned(self, living: Collection[str]) -> int:
        """Mark the unfinished fits of dead processes as interrupted, and return how many those were."""
        with self._database.write() as connection:
            if not self._database.leads(connection, Leader.INTERRUPT):
                return 0
            given_up = connection.execute(select(utc_now())).scalar_one() - GIVEN_UP_AFTER
            is_left = ~_adoptable | (fits.c.seen_at < given_up)
            abandoned = _unfinished & self._silent(living, SILENT_AFTER) & is_left
            return connection.execute(
                update(fits)
                .where(abandoned)
                .values(state=FitState.INTERRUPTED, error=INTERRUPTED, finished_at=utc_now())
            ).rowcount

    def _silent(self, living: Collection[str], after: timedelta) -> ColumnElement[bool]:
        """Whether the owner of a fit is dead, as `interrupt_abandoned` describes."""
        others = fits.c.owner.not_in({*living, self.owner})
        if self._database.is_sqlite:
            return others
        if self._database.availability.seconds_without_gap() < after.total_seconds():
            return false()
        return others & (fits.c.seen_at < utc_now() - literal(after, Interval()))

    def _set(self, fit: FitRecord, *, wakes: bool = False, **values: Any) -> FitRecord:
        with self._database.write() as connection:
            self._change(connection, fit, **values)
            if wakes:
                self._database.notify(connection)
            return self._get(connection, fit.id)

    def _change(self, connection: Connection, fit: FitRecord, **values: Any) -> None:
        own = (fits.c.id == fit.id) & (fits.c.owner == self.owner) & (fits.c.attempt == fit.attempt)
        changed = connection.execute(
            update(fits).where(own, _unfinished).values(**values, seen_at=utc_now())
        ).rowcount
        if changed != 1:
            raise FitLost(
                f"Process {self.owner} may not change fit {fit.id} (attempt {fit.attempt}): it has ended, "
                "or belongs to another process or attempt."
            )

    def _get(self, connection: Connection, fit_id: str) -> FitRecord:
        row = connection.execute(
            select(*_columns).where(fits.c.id == fit_id, fits.c.backbone_id == self._backbone_id)
        ).one_or_none()
        if row is None:
            raise FitNotFound(f"No fit has the id {fit_id!r}.")
        return _record(row._mapping)


def _record(row: Any) -> FitRecord:
    return FitRecord(**{**row, "state": FitState(row["state"]), "activate": ActivatePolicy(row["activate"])})
