"""Documents of calibrators and activations."""

from datetime import datetime
from typing import Any, Literal

from pydantic import Field

from boxcal.app.schemas import Document


class BackboneName(Document):
    """The backbone to which a calibrator was fitted."""

    name: str
    num_classes: int
    fingerprint: str = Field(description="SHA-256 of the weights.")
    model: str | None = Field(None, description="Name of the model, if several have the same backbone.")


class CalibratorDocument(Document):
    """One calibrator of the registry; version 0 is `uncalibrated` and was never fitted."""

    version: int
    method: str
    active: bool = Field(description="Whether this calibrator is active.")
    backbone: BackboneName | None = Field(
        None, description="Absent for version 0, which works with every backbone."
    )
    spec: dict[str, Any] | None = Field(None, description="The fitted parameters.")
    samples: int | None = Field(None, description="Size of the validation set.")
    sha256: str | None = Field(None, description="SHA-256 of the artifact.")
    size: int | None = Field(None, description="Size of the artifact in bytes.")
    created_at: datetime | None = None
    pruned_at: datetime | None = Field(None, description="When its artifact and report were deleted, if so.")


class Calibrators(Document):
    """Some calibrators, newest first."""

    calibrators: tuple[CalibratorDocument, ...]


class Activated(Document):
    """The active calibrator."""

    version: int
    method: str
    reason: Literal["fit", "request", "rollback", "refit"] = Field(description="Reason of the activation.")
    activated_at: datetime


class Activations(Document):
    """The newest activations, and where a rollback leads."""

    activations: tuple[Activated, ...]
    rollback_to: int | None = Field(description="Version that a rollback activates; null if there is none.")
