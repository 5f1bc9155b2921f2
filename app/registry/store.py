"""The registry: which calibrators there are, which one is active, and what became of every fit.

Its methods block, so the service calls them through `run`, in threads of the registry's own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal

from sqlalchemy import Connection, insert, select, true

from boxcal.app.http.problems import DamagedArtifact, NoReport
from boxcal.app.registry.activations import ActivationLog
from boxcal.app.registry.audit import SERVICE
from boxcal.app.registry.database import Database
from boxcal.app.registry.fits import FitLog
from boxcal.app.registry.maintenance import prune
from boxcal.app.registry.records import (
    UNCALIBRATED,
    Activation,
    BackboneIdentity,
    CalibratorRecord,
    Decision,
    FitRecord,
    FittedCalibrator,
    Reason,
)
from boxcal.app.registry.snapshot import Snapshots
from boxcal.app.registry.storage import SharedArtifacts
from boxcal.app.registry.tables import (
    backbones,
    calibrators,
    feedback_logs,
    find_record,
    record_of,
    refuse_pruned,
    select_records,
    utc_now,
)


class Registry:
    """The registry, as the backbone that this process serves sees it; connects on first use.

    `url`: SQLAlchemy URL.
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
        self.activations = ActivationLog(self.database, backbone, self.backbone_id)
        self.snapshots = Snapshots(self.database, self.backbone_id, owner)
        self.run = self.database.run

    def prune(self, keep_versions: int, keep_days: float) -> list[int]:
        """Delete the large parts of old calibrators, as `maintenance.prune` does."""
        return prune(self.database, keep_versions=keep_versions, keep_days=keep_days, leader_only=True)

    def close(self) -> None:
        """Wait for the calls that run, and close the connections, unless another model lent them."""
        if self._beside is None:
            self.database.close()

    # -- calibrators -----------------------------------------------------------------------------------------

    def list(
        self, limit: int = 1000, before: int | None = None, *, own: bool = False
    ) -> list[CalibratorRecord]:
        """At most `limit` calibrators, newest first; only versions lower than `before`."""
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
        """Look one up, whichever backbone it belongs to."""
        with self.database.read() as connection:
            return find_record(connection, version)

    def artifact(self, version: int) -> bytes:
        """Return the safetensors bytes of a fitted calibrator, after a check of their SHA-256."""
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

    def record_fit(
        self, fit: FitRecord, fitted: FittedCalibrator, decide: Callable[[int], Decision]
    ) -> tuple[int, Activation | None]:
        """Add a fit's calibrator, perhaps its activation, and the fit's success: one transaction.

        `decide`: called inside the transaction with the active version; says whether to activate. Returns the
        new version, and its activation if there was one.
        """
        if self._files is not None:  # before any replica asks for it
            self._files.write(hashlib.sha256(fitted.artifact).hexdigest(), fitted.artifact)
        with self.database.write() as connection:
            self.activations.lock(connection)
            version = self._add(connection, fitted)
            decision = decide(self.activations.active_in(connection).version)
            self.fits.succeed(connection, fit, version, decision, fitted.report["warnings"])
            if not decision.activate:
                return version, None
            return version, self.activations.activate_in(connection, version, Reason.FIT, SERVICE, fit=fit.id)

    def add(self, fitted: FittedCalibrator) -> int:
        """Add a calibrator that no fit of a client made; returns its version."""
        with self.database.write() as connection:
            return self._add(connection, fitted)

    def _add(self, connection: Connection, fitted: FittedCalibrator) -> int:
        values = {field.name: getattr(fitted, field.name) for field in fields(fitted)}
        values["sha256"] = hashlib.sha256(fitted.artifact).hexdigest()
        added = insert(calibrators).values(backbone_id=self.backbone_id, created_at=utc_now(), **values)
        version: int = connection.execute(added.returning(calibrators.c.version)).scalar_one()
        return version

    def _parts(self, version: int, *columns: Any) -> tuple[Any, ...]:
        with self.database.read() as connection:
            record = find_record(connection, version)
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
