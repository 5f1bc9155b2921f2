"""Calibrators as rows of the registry: what is selected of them, and the records that become of it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, func, select

from boxcal.app.http.problems import CalibratorNotFound, CalibratorPruned
from boxcal.app.registry.records import BackboneIdentity, CalibratorRecord
from boxcal.app.registry.tables import backbones, calibrators


def select_records() -> Any:
    """Select what a `CalibratorRecord` has."""
    columns = ("version", "method", "spec", "sha256", "samples", "created_at", "pruned_at")
    size = func.length(calibrators.c.artifact).label("size")
    owner = [backbones.c.name, backbones.c.fingerprint, backbones.c.labels, backbones.c.model]
    return select(*(calibrators.c[name] for name in columns), size, *owner).select_from(
        calibrators.outerjoin(backbones)
    )


def refuse_pruned(record: CalibratorRecord) -> None:
    """Raise CalibratorPruned if the large parts of a calibrator were deleted."""
    if record.pruned_at is not None:
        raise CalibratorPruned(f"Calibrator {record.version} was pruned at {record.pruned_at:%F %T} UTC.")


def record_of(row: Any) -> CalibratorRecord:
    """Read a row of `select_records`."""
    values = dict(row._mapping)
    name, fingerprint, labels, model = (
        values.pop(column) for column in ("name", "fingerprint", "labels", "model")
    )
    identity = None if fingerprint is None else BackboneIdentity(name, fingerprint, tuple(labels), model)
    return CalibratorRecord(backbone=identity, **values)


def find_record(connection: Connection, version: int) -> CalibratorRecord:
    row = connection.execute(select_records().where(calibrators.c.version == version)).one_or_none()
    if row is None:
        newest = connection.execute(select(func.max(calibrators.c.version))).scalar_one()
        raise CalibratorNotFound(f"There is no calibrator {version}; the newest is {newest}.")
    return record_of(row)
