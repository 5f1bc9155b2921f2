"""The record of fits: one row for each, from the moment its upload is accepted.

Several processes may share it. A fit belongs to its owner (a process) and its attempt: every change names
both and must hit exactly one unfinished row, otherwise it is rolled back. So a process that was paused, and
whose fit was given up meanwhile, can neither change nor activate anything. All times are the database's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any

from sqlalchemy import Connection, Interval, ScalarSelect, delete, insert, literal, select, update

from boxcal.app.registry.database import Database
from boxcal.app.registry.errors import FitLost, FitNotFound
from boxcal.app.registry.records import UNFINISHED, ActivatePolicy, Decision, FitRecord, FitState
from boxcal.app.registry.tables import fits, utc_now

INTERRUPTED = "The service stopped before the fit was over; upload the validation set again."
SILENT_AFTER = timedelta(seconds=60)
KEPT = 1000

_columns = [fits.c[field.name] for field in fields(FitRecord)]
_unfinished = fits.c.state.in_(UNFINISHED)


class FitLog:
    """The fits of one backbone.

    Parameters
    ----------
    database
        Holds them.
    backbone_id
        Selects the row of the backbone.
    owner
        Names this process; only the fits that it added are its own.
    """

    def __init__(self, database: Database, backbone_id: ScalarSelect[int], owner: str) -> None:
        self._database = database
        self._backbone_id = backbone_id
        self._owner = owner

    def add(self, fit_id: str, method: str, activate: ActivatePolicy, samples: int) -> FitRecord:
        """Record an accepted upload as queued; of the fits that have ended, only the newest `KEPT` remain."""
        ended = (fits.c.backbone_id == self._backbone_id) & ~_unfinished
        outdated = select(fits.c.id).where(ended).order_by(fits.c.created_at.desc()).offset(KEPT - 1)
        with self._database.write() as connection:
            connection.execute(delete(fits).where(fits.c.id.in_(outdated)))
            connection.execute(
                insert(fits).values(
                    id=fit_id,
                    backbone_id=self._backbone_id,
                    owner=self._owner,
                    state=FitState.QUEUED,
                    method=method,
                    activate=activate,
                    samples=samples,
                    progress=0.0,
                    stage="waiting",
                    created_at=utc_now(),
                    seen_at=utc_now(),
                )
            )
            return self._get(connection, fit_id)

    def get(self, fit_id: str) -> FitRecord:
        """Look one up.

        Raises
        ------
        FitNotFound
            No fit of this backbone has the id.
        """
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
        """Mark it running, as a new attempt.

        Raises
        ------
        FitLost
            It has ended, or belongs to another process or attempt; so for every change.
        """
        return self._set(
            fit, attempt=fit.attempt + 1, state=FitState.RUNNING, stage="starting", started_at=utc_now()
        )

    def advance(self, fit: FitRecord, progress: float, stage: str) -> FitRecord:
        """Record its progress, 0 to 1, which also says that its process is alive."""
        return self._set(fit, progress=progress, stage=stage)

    def end(self, fit: FitRecord, state: FitState, error: str) -> FitRecord:
        """Mark it `failed`, `cancelled` or `interrupted`, with the reason."""
        return self._set(fit, state=state, error=error, finished_at=utc_now())

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
                update(fits).where(fits.c.owner == self._owner, _unfinished).values(seen_at=utc_now())
            )

    def interrupt_abandoned(self, living: Collection[str]) -> int:
        """Mark the unfinished fits of dead processes as interrupted, and return how many those were.

        Parameters
        ----------
        living
            The owners known to be alive. With SQLite, whose processes share a data folder, every other owner
            is dead. With PostgreSQL an owner counts as dead once it was silent for `SILENT_AFTER` while the
            database answered all the time: after an outage everyone has been silent.
        """
        abandoned = _unfinished & fits.c.owner.not_in({*living, self._owner})
        if not self._database.is_sqlite:
            if self._database.contact.steady() < SILENT_AFTER.total_seconds():
                return 0
            abandoned &= fits.c.seen_at < utc_now() - literal(SILENT_AFTER, Interval())
        with self._database.write() as connection:
            return connection.execute(
                update(fits)
                .where(abandoned)
                .values(state=FitState.INTERRUPTED, error=INTERRUPTED, finished_at=utc_now())
            ).rowcount

    def _set(self, fit: FitRecord, **values: Any) -> FitRecord:
        with self._database.write() as connection:
            self._change(connection, fit, **values)
            return self._get(connection, fit.id)

    def _change(self, connection: Connection, fit: FitRecord, **values: Any) -> None:
        own = (fits.c.id == fit.id) & (fits.c.owner == self._owner) & (fits.c.attempt == fit.attempt)
        changed = connection.execute(
            update(fits).where(own, _unfinished).values(**values, seen_at=utc_now())
        ).rowcount
        if changed != 1:
            raise FitLost(
                f"Process {self._owner} may not change fit {fit.id} (attempt {fit.attempt}): it has ended, "
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
