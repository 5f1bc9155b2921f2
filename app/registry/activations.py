"""Which calibrator is active: every activation for a backbone, and the way back."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, Row, ScalarSelect, insert, select

from boxcal.app.http.problems import ForeignCalibrator, NothingToRollBack, OtherVersionActive
from boxcal.app.registry import audit
from boxcal.app.registry.audit import SERVICE, Action, Caller
from boxcal.app.registry.database import Database
from boxcal.app.registry.records import UNCALIBRATED, Activation, BackboneIdentity, CalibratorRecord, Reason
from boxcal.app.registry.tables import (
    activations,
    backbones,
    calibrators,
    find_record,
    refuse_pruned,
    utc_now,
)


class ActivationLog:
    """The activations for one backbone. The last one says which calibrator is active."""

    def __init__(
        self, database: Database, backbone: BackboneIdentity, backbone_id: ScalarSelect[int]
    ) -> None:
        self._database = database
        self._backbone = backbone
        self._backbone_id = backbone_id

    def active(self) -> Activation:
        """Return the last activation for this backbone; before any, version 0 is active."""
        with self._database.read() as connection:
            return self.active_in(connection)

    def list(self, limit: int) -> builtins.list[Activation]:
        """Return the newest activations for this backbone, newest first."""
        with self._database.read() as connection:
            return [_activation(row) for row in self._newest(connection, limit)]

    def check_belongs(self, version: int) -> CalibratorRecord:
        """Look a calibrator up, and refuse it unless it was fitted to the backbone served here."""
        with self._database.read() as connection:
            record = find_record(connection, version)
        if record.backbone not in (None, self._backbone):
            raise ForeignCalibrator(
                f"Calibrator {version} belongs to the backbone {record.backbone}; "
                f"this service runs {self._backbone}."
            )
        return record

    def activate(
        self,
        version: int,
        reason: Reason = Reason.REQUEST,
        caller: Caller = SERVICE,
        expected: int | None = None,
    ) -> Activation:
        """Activate a calibrator; if it already is active, nothing is added.

        `expected`: the version that must be active before; None if any may.
        """
        self.check_belongs(version)
        with self._database.write() as connection:
            return self.activate_in(connection, version, reason, caller, expected=expected)

    def rollback_target(self, expected: int | None = None) -> int:
        """Return the version that `rollback` would activate."""
        with self._database.read() as connection:
            return self._before(connection, expected)[0]

    def rollback(self, caller: Caller = SERVICE, expected: int | None = None) -> Activation:
        """Return to the calibrator before the active one, or `expected`; twice goes back twice."""
        with self._database.write() as connection:
            self.lock(connection)
            version, previous = self._before(connection, expected)
            return self._append(connection, version, Reason.ROLLBACK, previous, caller=caller)

    # -- inside a transaction of the caller ------------------------------------------------------------------

    def lock(self, connection: Connection) -> None:
        """Let no other transaction activate before this one ends."""
        # SQLite has one writer at a time; on PostgreSQL this row keeps the activations of replicas in order.
        connection.execute(
            select(backbones.c.id).where(backbones.c.id == self._backbone_id).with_for_update()
        )

    def active_in(self, connection: Connection) -> Activation:
        """Return the last activation, as `active`."""
        if row := self._last(connection):
            return _activation(row)
        now = connection.execute(select(utc_now())).scalar_one()
        return Activation(0, UNCALIBRATED, "uncalibrated", Reason.REQUEST, now)

    def activate_in(
        self,
        connection: Connection,
        version: int,
        reason: Reason,
        caller: Caller,
        *,
        fit: str | None = None,
        expected: int | None = None,
    ) -> Activation:
        """Activate a calibrator of this backbone; `fit` is the fit that made it, for the audit log."""
        self.lock(connection)
        current = self.active_in(connection)
        _refuse_unexpected(current.version, expected)
        if current.version == version:
            return current
        return self._append(connection, version, reason, current.id, caller=caller, fit=fit)

    def _append(
        self,
        connection: Connection,
        version: int,
        reason: Reason,
        previous: int | None,
        *,
        caller: Caller,
        fit: str | None = None,
    ) -> Activation:
        record = find_record(connection, version)
        refuse_pruned(record)
        action = Action.ROLLBACK if reason is Reason.ROLLBACK else Action.ACTIVATE
        details = {"method": record.method} | ({} if fit is None else {"fit": fit})
        audit.append(connection, caller, action, f"calibrator {version}", **details)
        added = insert(activations).values(
            backbone_id=self._backbone_id,
            version=version,
            reason=reason,
            previous=previous or None,
            created_at=utc_now(),
        )
        connection.execute(added)
        self._database.notify(connection)
        return self.active_in(connection)

    def _before(self, connection: Connection, expected: int | None) -> tuple[int, int | None]:
        """Return the version that a rollback activates, and the activation before that one."""
        current = self._last(connection)
        _refuse_unexpected(UNCALIBRATED if current is None else current.version, expected)
        if current is None:
            raise NothingToRollBack("Version 0 (uncalibrated) is active, and no activation came before it.")
        if current.previous is None:
            if current.version == UNCALIBRATED:
                raise NothingToRollBack("Version 0 (uncalibrated) is active: everything is rolled back.")
            return UNCALIBRATED, None
        row = connection.execute(
            select(activations.c.version, activations.c.previous).where(activations.c.id == current.previous)
        ).one()
        return row.version, row.previous

    def _last(self, connection: Connection) -> Row[Any] | None:
        return next(iter(self._newest(connection, 1)), None)

    def _newest(self, connection: Connection, limit: int) -> Sequence[Row[Any]]:
        own = select(activations, calibrators.c.method).join_from(activations, calibrators)
        newest = own.where(activations.c.backbone_id == self._backbone_id).order_by(activations.c.id.desc())
        return connection.execute(newest.limit(limit)).all()


def _activation(row: Row[Any]) -> Activation:
    return Activation(row.id, row.version, row.method, Reason(row.reason), row.created_at)


def _refuse_unexpected(active: int, expected: int | None) -> None:
    if expected is not None and active != expected:
        raise OtherVersionActive(
            f"Version {active} is active, not version {expected} as expected; nothing was changed."
        )
