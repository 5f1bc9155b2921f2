"""The registry: which calibrators there are, which one is active, and what became of every fit.

It is where a refit ends and every start begins. Its methods block, so the service calls them in a thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Literal

from sqlalchemy import Connection, func, insert, select
from sqlalchemy.exc import IntegrityError

from boxcal.app.registry.database import Database
from boxcal.app.registry.errors import (
    CalibratorNotFound,
    DamagedArtifact,
    ForeignCalibrator,
    NoReport,
    NothingToRollBack,
)
from boxcal.app.registry.fits import FitLog
from boxcal.app.registry.records import (
    Activation,
    BackboneIdentity,
    CalibratorRecord,
    Decision,
    FittedCalibrator,
    Reason,
)
from boxcal.app.registry.tables import activations, backbones, calibrators

UNCALIBRATED = 0


class Registry:
    """The record, as the backbone that this process serves sees it.

    Parameters
    ----------
    database
        Opened and up to date; the registry closes it.
    backbone
        What this process serves. Calibrators of other backbones are listed, and refused.
    owner
        Names this process among those that share the database.
    """

    def __init__(self, database: Database, backbone: BackboneIdentity, *, owner: str) -> None:
        self._database = database
        self._backbone = backbone
        self._backbone_id = _backbone_id(database, backbone)
        self.fits = FitLog(database, self._backbone_id, owner)

    @classmethod
    def open(cls, url: str, backbone: BackboneIdentity, *, owner: str, living: Collection[str]) -> Registry:
        """Open the database at `url`, up to date, its abandoned fits marked as interrupted."""
        database = Database(url)
        registry = cls(database, backbone, owner=owner)
        registry.fits.interrupt_abandoned({*living, owner})
        return registry

    def close(self) -> None:
        """Give the database back."""
        self._database.close()

    # -- calibrators -----------------------------------------------------------------------------------------

    def list(self) -> list[CalibratorRecord]:
        """Every calibrator, newest first."""
        with self._database.read() as connection:
            return [
                _record(row) for row in connection.execute(_records().order_by(calibrators.c.version.desc()))
            ]

    def get(self, version: int) -> CalibratorRecord:
        """Look one up, whichever backbone it belongs to.

        Raises
        ------
        CalibratorNotFound
            There is no such version.
        """
        with self._database.read() as connection:
            return self._get(connection, version)

    def artifact(self, version: int) -> bytes:
        """Return the safetensors bytes of a fitted calibrator, once they match the hash recorded with them.

        Raises
        ------
        CalibratorNotFound, NoReport, DamagedArtifact
            No such version; version 0, which has none; other bytes than were recorded.
        """
        data, sha256 = self._parts(version, calibrators.c.artifact, calibrators.c.sha256)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise DamagedArtifact(f"The artifact of calibrator {version} does not have its SHA-256 {sha256}.")
        return bytes(data)

    def report(self, version: int) -> dict[str, Any]:
        """Return the report on data the fit never saw."""
        (document,) = self._parts(version, calibrators.c.report)
        return dict(document)

    def reliability(self, version: int, suffix: Literal["svg", "png"]) -> bytes:
        """Return the reliability diagram of the report; calibrators of the first releases have no PNG."""
        (image,) = self._parts(version, calibrators.c[f"reliability_{suffix}"])
        return bytes(image)

    # -- activations -----------------------------------------------------------------------------------------

    def active_version(self) -> int:
        """Return the active version for this backbone; 0 before any activation."""
        with self._database.read() as connection:
            current = self._current(connection)
            return UNCALIBRATED if current is None else current.version

    def check_belongs(self, version: int) -> CalibratorRecord:
        """Look a calibrator up, and refuse it unless it was fitted to the backbone served here.

        Raises
        ------
        CalibratorNotFound, ForeignCalibrator
            There is no such version; it belongs to another backbone.
        """
        record = self.get(version)
        if record.backbone not in (None, self._backbone):
            raise ForeignCalibrator(
                f"Calibrator {version} belongs to the backbone {record.backbone}; "
                f"this service runs {self._backbone}."
            )
        return record

    def activate(self, version: int) -> Activation:
        """Activate a calibrator; where it already is, nothing is added.

        Raises
        ------
        CalibratorNotFound, ForeignCalibrator
            As `check_belongs`.
        """
        self.check_belongs(version)
        with self._database.write() as connection:
            return self._activate(connection, version, Reason.REQUEST)

    def rollback_target(self) -> int:
        """Return the version that `rollback` would activate.

        Raises
        ------
        NothingToRollBack
            No activation came before the active one.
        """
        with self._database.read() as connection:
            return self._before(connection)[0]

    def rollback(self) -> Activation:
        """Return to the calibrator before the active one; twice goes back twice.

        Raises
        ------
        NothingToRollBack
            As `rollback_target`.
        """
        with self._database.write() as connection:
            self._lock(connection)
            version, previous = self._before(connection)
            return self._append(connection, version, Reason.ROLLBACK, previous)

    def record_fit(
        self, fit_id: str, fitted: FittedCalibrator, decide: Callable[[int], Decision]
    ) -> tuple[int, Decision]:
        """Add a fit's calibrator, perhaps its activation, and the fit's success: one transaction.

        Parameters
        ----------
        decide
            Called inside the transaction with the active version; says whether to activate.

        Returns
        -------
        The new version and the decision.
        """
        with self._database.write() as connection:
            self._lock(connection)
            version = self._add(connection, fitted)
            current = self._current(connection)
            decision = decide(UNCALIBRATED if current is None else current.version)
            if decision.activate:
                self._activate(connection, version, Reason.FIT)
            self.fits.succeed(connection, fit_id, version, decision, fitted.report["warnings"])
        return version, decision

    def _add(self, connection: Connection, fitted: FittedCalibrator) -> int:
        version: int = connection.execute(
            insert(calibrators)
            .values(
                backbone_id=self._backbone_id,
                method=fitted.method,
                spec=fitted.spec,
                artifact=fitted.artifact,
                sha256=hashlib.sha256(fitted.artifact).hexdigest(),
                report=fitted.report,
                reliability_svg=fitted.reliability_svg,
                reliability_png=fitted.reliability_png,
                samples=fitted.samples,
                created_at=datetime.now(UTC),
            )
            .returning(calibrators.c.version)
        ).scalar_one()
        return version

    def _activate(self, connection: Connection, version: int, reason: Reason) -> Activation:
        self._lock(connection)
        current = self._current(connection)
        if current is None and version == UNCALIBRATED:
            return self._activation(connection, version, reason, datetime.now(UTC))
        if current is not None and current.version == version:
            return self._activation(connection, version, Reason(current.reason), current.created_at)
        return self._append(connection, version, reason, None if current is None else current.id)

    def _append(
        self, connection: Connection, version: int, reason: Reason, previous: int | None
    ) -> Activation:
        now = datetime.now(UTC)
        connection.execute(
            insert(activations).values(
                backbone_id=self._backbone_id,
                version=version,
                reason=reason,
                previous=previous,
                created_at=now,
            )
        )
        return self._activation(connection, version, reason, now)

    def _activation(
        self, connection: Connection, version: int, reason: Reason, moment: datetime
    ) -> Activation:
        return Activation(version, self._get(connection, version).method, reason, moment)

    def _before(self, connection: Connection) -> tuple[int, int | None]:
        # Version 0 is active before the first activation, without a row of its own.
        current = self._current(connection)
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

    def _current(self, connection: Connection) -> Any:
        return connection.execute(
            select(activations)
            .where(activations.c.backbone_id == self._backbone_id)
            .order_by(activations.c.id.desc())
            .limit(1)
        ).one_or_none()

    def _lock(self, connection: Connection) -> None:
        # SQLite's writers come one at a time anyway; on PostgreSQL this row keeps two replicas in order.
        connection.execute(
            select(backbones.c.id).where(backbones.c.id == self._backbone_id).with_for_update()
        )

    def _get(self, connection: Connection, version: int) -> CalibratorRecord:
        row = connection.execute(_records().where(calibrators.c.version == version)).one_or_none()
        if row is None:
            newest = connection.execute(select(func.max(calibrators.c.version))).scalar_one()
            raise CalibratorNotFound(f"There is no calibrator {version}; the newest is {newest}.")
        return _record(row)

    def _parts(self, version: int, *columns: Any) -> tuple[Any, ...]:
        with self._database.read() as connection:
            self._get(connection, version)
            row = connection.execute(select(*columns).where(calibrators.c.version == version)).one()
        if row[0] is None:
            if version == UNCALIBRATED:
                raise NoReport("Calibrator 0 has no report: it was never fitted.")
            raise NoReport(f"Calibrator {version} has no PNG: an older release recorded it.")
        return tuple(row)


def _backbone_id(database: Database, backbone: BackboneIdentity) -> int:
    """Find the row of a backbone, or make it on first sight."""
    known = select(backbones.c.id).where(
        backbones.c.name == backbone.name,
        backbones.c.fingerprint == backbone.fingerprint,
        backbones.c.labels_sha256 == backbone.labels_sha256,
    )
    with database.read() as connection:
        row = connection.execute(known).scalar_one_or_none()
    if row is None:
        # Another replica may make it at the same moment; then there is nothing left to do.
        with suppress(IntegrityError), database.write() as connection:
            connection.execute(
                insert(backbones).values(
                    name=backbone.name,
                    fingerprint=backbone.fingerprint,
                    num_classes=backbone.num_classes,
                    labels=list(backbone.labels),
                    labels_sha256=backbone.labels_sha256,
                    created_at=datetime.now(UTC),
                )
            )
        with database.read() as connection:
            row = connection.execute(known).scalar_one()
    return int(row)


def _records() -> Any:
    summary = [
        calibrators.c[name] for name in ("version", "method", "spec", "sha256", "samples", "created_at")
    ]
    size = func.length(calibrators.c.artifact).label("size")
    owner = [backbones.c.name, backbones.c.fingerprint, backbones.c.labels]
    return select(*summary, size, *owner).select_from(calibrators.outerjoin(backbones))


def _record(row: Any) -> CalibratorRecord:
    backbone = None
    if row.fingerprint is not None:
        backbone = BackboneIdentity(row.name, row.fingerprint, tuple(row.labels))
    return CalibratorRecord(
        version=row.version,
        method=row.method,
        backbone=backbone,
        spec=row.spec,
        sha256=row.sha256,
        size=row.size,
        samples=row.samples,
        created_at=row.created_at,
    )
