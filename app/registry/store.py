"""The registry: which calibrators there are, which one is active, and what became of every fit.

Its methods block, so the service calls them through `run`, in threads of the registry's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

from sqlalchemy import Connection, func, insert, select, true

from boxcal.app.registry import audit
from boxcal.app.registry.artifacts import SharedArtifacts
from boxcal.app.registry.audit import SERVICE, Action, Caller
from boxcal.app.registry.database import Database
from boxcal.app.registry.errors import (
    CalibratorNotFound,
    DamagedArtifact,
    ForeignCalibrator,
    NoReport,
    NothingToRollBack,
)
from boxcal.app.registry.fits import FitLog
from boxcal.app.registry.glance import Glances
from boxcal.app.registry.records import (
    Activation,
    BackboneIdentity,
    CalibratorRecord,
    Decision,
    FitRecord,
    FittedCalibrator,
    Reason,
)
from boxcal.app.registry.retention import prune
from boxcal.app.registry.rows import record_of, refuse_pruned, select_records
from boxcal.app.registry.tables import activations, backbones, calibrators, feedback_logs, utc_now
from boxcal.app.registry.threads import RegistryThreads

UNCALIBRATED = 0


class Registry:
    """The registry, as the backbone that this process serves sees it; connects on first use.

    Parameters
    ----------
    url
        SQLAlchemy URL.
    backbone
        What this process serves. Calibrators of other backbones are listed, and refused.
    owner
        Names this process among those that share the database.
    migrate
        Whether to apply missing migrations on PostgreSQL.
    beside
        The registry of another model of this process, whose connections and threads this one uses.
    files
        Artifacts that the replicas share beside the database, if they share a directory.

    Attributes
    ----------
    backbone
        As given.
    backbone_id
        Selects its row.
    run
        Calls a blocking function in one of the registry's threads: ``await registry.run(registry.get, 3)``.

    Raises
    ------
    RegistryUnusable, RegistryUnavailable
        This release cannot use the database; from every method: the database does not answer.
    """

    def __init__(
        self,
        url: str,
        backbone: BackboneIdentity,
        *,
        owner: str,
        migrate: bool = True,
        files: SharedArtifacts | None = None,
        beside: Registry | None = None,
    ) -> None:
        self.backbone = backbone
        self._files = files
        known = select(backbones.c.id).where(
            backbones.c.name == backbone.name,
            backbones.c.fingerprint == backbone.fingerprint,
            backbones.c.labels_sha256 == backbone.labels_sha256,
        )
        self.backbone_id = known.scalar_subquery()
        self._beside = beside
        self.database: Database = Database(url, migrate=migrate) if beside is None else beside.database
        self.database.prepare(self._add_backbone)
        self.fits = FitLog(self.database, self.backbone_id, owner)
        self.glances = Glances(self.database, self.backbone_id, owner)
        self._threads: RegistryThreads = (
            RegistryThreads(self.database.contact) if beside is None else beside._threads
        )
        self.run = self._threads.run

    def prune(self, keep_versions: int, keep_days: float) -> list[int]:
        """Delete the large parts of old calibrators, as `retention.prune` does."""
        return prune(self.database, keep_versions=keep_versions, keep_days=keep_days, leader_only=True)

    def close(self) -> None:
        """Wait for the calls that run, and close the connections, unless another model lent them."""
        if self._beside is None:
            self._threads.close()
            self.database.close()

    # -- calibrators -----------------------------------------------------------------------------------------

    def list(
        self, limit: int = 1000, before: int | None = None, *, own: bool = False
    ) -> list[CalibratorRecord]:
        """At most `limit` calibrators, newest first; only versions lower than `before`.

        Parameters
        ----------
        own
            Whether to leave those of other backbones out.
        """
        older = true() if before is None else calibrators.c.version < before
        mine = calibrators.c.backbone_id.is_(None) | (calibrators.c.backbone_id == self.backbone_id)
        page = (
            select_records()
            .where(older, mine if own else true())
            .order_by(calibrators.c.version.desc())
            .limit(limit)
        )
        with self.database.read() as connection:
            return [record_of(row) for row in connection.execute(page)]

    def get(self, version: int) -> CalibratorRecord:
        """Look one up, whichever backbone it belongs to.

        Raises
        ------
        CalibratorNotFound
            There is no such version.
        """
        with self.database.read() as connection:
            return self._get(connection, version)

    def artifact(self, version: int) -> bytes:
        """Return the safetensors bytes of a fitted calibrator, after a check of their SHA-256.

        Raises
        ------
        CalibratorNotFound, NoReport, CalibratorPruned, DamagedArtifact
            No such version; version 0, which has none; deleted; the bytes are not those that were recorded.
        """
        if self._files is not None:
            record = self.get(version)
            kept = None if record.sha256 is None else self._files.read(record.sha256)
            if kept is not None and record.pruned_at is None:
                return kept
        data, sha256 = self._parts(version, calibrators.c.artifact, calibrators.c.sha256)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise DamagedArtifact(f"The artifact of calibrator {version} does not have its SHA-256 {sha256}.")
        if self._files is not None:
            self._files.write(sha256, bytes(data))
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

    def active(self) -> Activation:
        """Return the last activation for this backbone; before any, version 0 is active."""
        with self.database.read() as connection:
            return self._active(connection)

    def check_belongs(self, version: int) -> CalibratorRecord:
        """Look a calibrator up, and refuse it unless it was fitted to the backbone served here.

        Raises
        ------
        CalibratorNotFound, ForeignCalibrator
            There is no such version; it belongs to another backbone.
        """
        record = self.get(version)
        if record.backbone not in (None, self.backbone):
            raise ForeignCalibrator(
                f"Calibrator {version} belongs to the backbone {record.backbone}; "
                f"this service runs {self.backbone}."
            )
        return record

    def activate(self, version: int, reason: Reason = Reason.REQUEST, caller: Caller = SERVICE) -> Activation:
        """Activate a calibrator; if it already is active, nothing is added.

        Parameters
        ----------
        caller
            For the audit log.

        Raises
        ------
        CalibratorNotFound, ForeignCalibrator, CalibratorPruned
            As `check_belongs`; its artifact was deleted.
        """
        self.check_belongs(version)
        with self.database.write() as connection:
            return self._activate(connection, version, reason, caller)

    def activations(self, limit: int) -> Sequence[Activation]:
        """Return the newest activations for this backbone, newest first."""
        with self.database.read() as connection:
            rows = connection.execute(
                select(
                    activations.c.id,
                    activations.c.version,
                    activations.c.reason,
                    activations.c.created_at,
                    calibrators.c.method,
                )
                .join(calibrators, calibrators.c.version == activations.c.version)
                .where(activations.c.backbone_id == self.backbone_id)
                .order_by(activations.c.id.desc())
                .limit(limit)
            ).all()
        return [
            Activation(row.id, row.version, row.method, Reason(row.reason), row.created_at) for row in rows
        ]

    def rollback_target(self) -> int:
        """Return the version that `rollback` would activate.

        Raises
        ------
        NothingToRollBack
            No activation came before the active one.
        """
        with self.database.read() as connection:
            return self._before(connection)[0]

    def rollback(self, caller: Caller = SERVICE) -> Activation:
        """Return to the calibrator before the active one; twice goes back twice.

        Raises
        ------
        NothingToRollBack, CalibratorPruned
            As `rollback_target`; the artifact of that calibrator was deleted.
        """
        with self.database.write() as connection:
            self._lock(connection)
            version, previous = self._before(connection)
            return self._append(connection, version, Reason.ROLLBACK, previous, caller=caller)

    def record_fit(
        self, fit: FitRecord, fitted: FittedCalibrator, decide: Callable[[int], Decision]
    ) -> tuple[int, Activation | None]:
        """Add a fit's calibrator, perhaps its activation, and the fit's success: one transaction.

        Parameters
        ----------
        decide
            Called inside the transaction with the active version; says whether to activate.

        Returns
        -------
        The new version, and its activation if there was one.

        Raises
        ------
        FitLost
            The fit has ended, or belongs to another process or attempt; nothing is recorded.
        """
        if self._files is not None:  # before any replica asks for it
            self._files.write(hashlib.sha256(fitted.artifact).hexdigest(), fitted.artifact)
        with self.database.write() as connection:
            self._lock(connection)
            version = self._add(connection, fitted)
            decision = decide(self._active(connection).version)
            self.fits.succeed(connection, fit, version, decision, fitted.report["warnings"])
            if not decision.activate:
                return version, None
            return version, self._activate(connection, version, Reason.FIT, SERVICE, fit=fit.id)

    def add(self, fitted: FittedCalibrator) -> int:
        """Add a calibrator that no fit of a client made; returns its version."""
        with self.database.write() as connection:
            return self._add(connection, fitted)

    def _add(self, connection: Connection, fitted: FittedCalibrator) -> int:
        values = {
            "method": fitted.method,
            "spec": fitted.spec,
            "artifact": fitted.artifact,
            "sha256": hashlib.sha256(fitted.artifact).hexdigest(),
            "report": fitted.report,
            "reliability_svg": fitted.reliability_svg,
            "reliability_png": fitted.reliability_png,
            "samples": fitted.samples,
        }
        added = insert(calibrators).values(backbone_id=self.backbone_id, created_at=utc_now(), **values)
        version: int = connection.execute(added.returning(calibrators.c.version)).scalar_one()
        return version

    def _activate(
        self, connection: Connection, version: int, reason: Reason, caller: Caller, fit: str | None = None
    ) -> Activation:
        self._lock(connection)
        current = self._active(connection)
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
        record = self._get(connection, version)
        refuse_pruned(record)
        action = Action.ROLLBACK if reason is Reason.ROLLBACK else Action.ACTIVATE
        details = {"method": record.method} | ({} if fit is None else {"fit": fit})
        audit.append(connection, caller, action, f"calibrator {version}", **details)
        added = insert(activations).values(
            backbone_id=self.backbone_id,
            version=version,
            reason=reason,
            previous=previous or None,
            created_at=utc_now(),
        )
        connection.execute(added)
        self.database.notify(connection)
        return self._active(connection)

    def _active(self, connection: Connection) -> Activation:
        row = self._last(connection)
        if row is None:
            now = connection.execute(select(utc_now())).scalar_one()
            return Activation(0, UNCALIBRATED, "uncalibrated", Reason.REQUEST, now)
        method = self._get(connection, row.version).method
        return Activation(row.id, row.version, method, Reason(row.reason), row.created_at)

    def _before(self, connection: Connection) -> tuple[int, int | None]:
        """Return the version that a rollback activates, and the activation before that one."""
        current = self._last(connection)
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

    def _last(self, connection: Connection) -> Any:
        own = select(activations).where(activations.c.backbone_id == self.backbone_id)
        return connection.execute(own.order_by(activations.c.id.desc()).limit(1)).one_or_none()

    def _lock(self, connection: Connection) -> None:
        # SQLite has one writer at a time; on PostgreSQL this row keeps the activations of replicas in order.
        connection.execute(select(backbones.c.id).where(backbones.c.id == self.backbone_id).with_for_update())

    def _get(self, connection: Connection, version: int) -> CalibratorRecord:
        row = connection.execute(select_records().where(calibrators.c.version == version)).one_or_none()
        if row is None:
            newest = connection.execute(select(func.max(calibrators.c.version))).scalar_one()
            raise CalibratorNotFound(f"There is no calibrator {version}; the newest is {newest}.")
        return record_of(row)

    def _parts(self, version: int, *columns: Any) -> tuple[Any, ...]:
        with self.database.read() as connection:
            record = self._get(connection, version)
            row = connection.execute(select(*columns).where(calibrators.c.version == version)).one()
        if row[0] is None:
            refuse_pruned(record)
            if version == UNCALIBRATED:
                raise NoReport("Calibrator 0 has no report: it was never fitted.")
            raise NoReport(f"Calibrator {version} has no PNG: an older release recorded it.")
        return tuple(row)

    def _add_backbone(self, connection: Connection) -> None:
        if connection.execute(select(self.backbone_id)).scalar() is None:
            connection.execute(
                insert(backbones).values(
                    name=self.backbone.name,
                    fingerprint=self.backbone.fingerprint,
                    num_classes=self.backbone.num_classes,
                    labels=list(self.backbone.labels),
                    labels_sha256=self.backbone.labels_sha256,
                    model=self.backbone.model,
                    created_at=utc_now(),
                )
            )
        log = select(feedback_logs.c.seq).where(feedback_logs.c.backbone_id == self.backbone_id)
        if connection.execute(log).scalar() is None:
            connection.execute(insert(feedback_logs).values(backbone_id=self.backbone_id, seq=0, row_count=0))
