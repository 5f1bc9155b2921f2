"""Schemas of calibrators in the HTTP API."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Self

from pydantic import BaseModel, Field

from boxcal.app.registry.records import Activation, BackboneIdentity, CalibratorRecord, Reason


class Backbone(BaseModel):
    """The backbone to which a calibrator was fitted."""

    name: str
    num_classes: int
    fingerprint: str = Field(description="SHA-256 of the weights.")
    model: str | None = Field(None, description="Name of the model, if several have the same backbone.")

    @classmethod
    def of(cls, identity: BackboneIdentity) -> Self:
        """Return the schema of an identity."""
        return cls(
            name=identity.name,
            num_classes=identity.num_classes,
            fingerprint=identity.fingerprint,
            model=identity.model or None,
        )


class Calibrator(BaseModel):
    """One calibrator of the registry; version 0 is `uncalibrated` and was never fitted."""

    version: int
    method: str
    active: bool = Field(description="Whether this calibrator is active.")
    backbone: Backbone | None = Field(
        None, description="Absent for version 0, which works with every backbone."
    )
    spec: dict[str, Any] | None = Field(None, description="The fitted parameters.")
    samples: int | None = Field(None, description="Size of the validation set.")
    sha256: str | None = Field(None, description="SHA-256 of the artifact.")
    size: int | None = Field(None, description="Size of the artifact in bytes.")
    created_at: datetime | None = None
    pruned_at: datetime | None = Field(None, description="When its artifact and report were deleted, if so.")

    @classmethod
    def of(cls, record: CalibratorRecord, active: int) -> Self:
        """Return the schema of a record, given the active version."""
        return cls(
            version=record.version,
            method=record.method,
            active=record.version == active,
            backbone=Backbone.of(record.backbone) if record.backbone else None,
            spec=record.spec,
            samples=record.samples,
            sha256=record.sha256,
            size=record.size,
            created_at=record.created_at if record.backbone else None,
            pruned_at=record.pruned_at,
        )


class Calibrators(BaseModel):
    """Some calibrators, newest first."""

    calibrators: list[Calibrator]


class Activated(BaseModel):
    """The active calibrator."""

    version: int
    method: str
    reason: Reason = Field(description="Reason of the activation.")
    activated_at: datetime

    @classmethod
    def of(cls, activation: Activation) -> Self:
        """Return the schema of an activation."""
        return cls(
            version=activation.version,
            method=activation.method,
            reason=activation.reason,
            activated_at=activation.created_at,
        )


class Activations(BaseModel):
    """The newest activations, and where a rollback leads."""

    activations: list[Activated]
    rollback_to: int | None = Field(description="Version that a rollback activates; null if there is none.")
