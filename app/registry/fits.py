"""The record of fits: a row from the moment an upload is accepted until its fit is over, whatever ends it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Select, delete, insert, select, update

from boxcal.app.registry.database import Database
from boxcal.app.registry.errors import FitNotFound
from boxcal.app.registry.records import UNFINISHED, ActivatePolicy, Decision, FitRecord, FitState
from boxcal.app.registry.tables import fits

INTERRUPTED = "The service stopped before the fit was over; upload the validation set again."
SILENT_AFTER = timedelta(seconds=60)
KEPT = 1000

_columns = [fits.c[field.name] for field in fields(FitRecord)]


class FitLog:
    """The fits of one backbone, as one process sees and runs them.

    Parameters
    ----------
    database
        Where they are kept.
    backbone_id
        Row of the backbone they are for.
    owner
        Names this process; the fits it accepts are its own, and no other process ends them while it lives.
    """

    def __init__(self, database: Database, backbone_id: int, owner: str) -> None:
        self._database = database
        self._backbone_id = backbone_id
        self._owner = owner

    def add(self, fit_id: str, method: str, activate: ActivatePolicy, samples: int) -> FitRecord:
        """Record an accepted upload as queued; of the fits that are over, the oldest beyond `KEPT` go."""
        now = datetime.now(UTC)
        with self._database.write() as connection:
            connection.execute(delete(fits).where(fits.c.id.in_(self._outdated())))
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
                    created_at=now,
                    seen_at=now,
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

    def list(self, limit: int) -> list[FitRecord]:
        """Newest first, at most `limit`."""
        with self._database.read() as connection:
            rows = connection.execute(
                select(*_columns)
                .where(fits.c.backbone_id == self._backbone_id)
                .order_by(fits.c.created_at.desc(), fits.c.id)
                .limit(limit)
            )
            return [_record(row._mapping) for row in rows]

    def start(self, fit_id: str) -> FitRecord:
        """Mark it running."""
        return self._set(fit_id, state=FitState.RUNNING, stage="starting", started_at=datetime.now(UTC))

    def advance(self, fit_id: str, progress: float, stage: str) -> FitRecord:
        """Record how far it is, which also says that its process is alive."""
        return self._set(fit_id, progress=progress, stage=stage)

    def end(self, fit_id: str, state: FitState, error: str) -> FitRecord:
        """Mark it `failed`, `cancelled` or `interrupted`, and say why."""
        return self._set(fit_id, state=state, error=error, finished_at=datetime.now(UTC))

    def succeed(
        self,
        connection: Connection,
        fit_id: str,
        version: int,
        decision: Decision,
        warnings: Sequence[dict[str, Any]],
    ) -> None:
        """Mark it succeeded inside the transaction that adds its calibrator."""
        now = datetime.now(UTC)
        self._update(
            connection,
            fit_id,
            state=FitState.SUCCEEDED,
            progress=1.0,
            stage="done",
            calibrator=version,
            activated=decision.activate,
            decision=decision.why,
            warnings=warnings,
            finished_at=now,
            seen_at=now,
        )

    def keep_alive(self) -> None:
        """Say that this process is alive and still means to end its fits."""
        with self._database.write() as connection:
            connection.execute(
                update(fits)
                .where(fits.c.owner == self._owner, fits.c.state.in_(UNFINISHED))
                .values(seen_at=datetime.now(UTC))
            )

    def interrupt_abandoned(self, living: Collection[str]) -> int:
        """Mark as interrupted what no process is working on any more, and say how many those were.

        Parameters
        ----------
        living
            The owners known to be alive. With SQLite, whose processes share a data folder, every other owner
            is dead. With PostgreSQL an owner elsewhere is given up once it was silent for a minute.
        """
        abandoned = fits.c.state.in_(UNFINISHED) & fits.c.owner.not_in(tuple(living))
        now = datetime.now(UTC)
        if not self._database.is_sqlite:
            abandoned &= fits.c.seen_at < now - SILENT_AFTER
        with self._database.write() as connection:
            return connection.execute(
                update(fits)
                .where(abandoned)
                .values(state=FitState.INTERRUPTED, error=INTERRUPTED, finished_at=now, seen_at=now)
            ).rowcount

    def _outdated(self) -> Select[tuple[Any]]:
        over = (fits.c.backbone_id == self._backbone_id) & fits.c.state.not_in(UNFINISHED)
        return select(fits.c.id).where(over).order_by(fits.c.created_at.desc()).offset(KEPT - 1)

    def _set(self, fit_id: str, **values: Any) -> FitRecord:
        with self._database.write() as connection:
            self._update(connection, fit_id, **values, seen_at=datetime.now(UTC))
            return self._get(connection, fit_id)

    def _update(self, connection: Connection, fit_id: str, **values: Any) -> None:
        # A final state stays: what comes late, such as progress after a cancellation, changes nothing.
        connection.execute(
            update(fits).where(fits.c.id == fit_id, fits.c.state.in_(UNFINISHED)).values(**values)
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
