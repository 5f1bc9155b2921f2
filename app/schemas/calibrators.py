"""Documents of calibrators and activations."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import Field

from boxcal.app.schemas import Document, MayGrow


class BackboneName(Document):
    """The backbone to which a calibrator was fitted."""

    name: str = Field(examples=["digits"])
    num_classes: int = Field(examples=[10])
    fingerprint: str = Field(description="SHA-256 of the weights.", examples=["21f0771c6297c836"])
    model: str | None = Field(
        None, description="Name of the model, if several have the same backbone.", examples=["digits"]
    )


class CalibratorDocument(Document):
    """One calibrator of the registry; version 0 is `uncalibrated` and was never fitted."""

    version: int = Field(examples=[1])
    method: str = Field(examples=["ts"])
    active: bool = Field(description="Whether this calibrator is active.")
    backbone: BackboneName | None = Field(
        None, description="Absent for version 0, which works with every backbone."
    )
    spec: dict[str, Any] | None = Field(
        None,
        description="The fitted parameters.",
        examples=[{"method": "ts", "parameters": {"temperature": 1.79}}],
    )
    samples: int | None = Field(None, description="Size of the validation set.", examples=[539])
    sha256: str | None = Field(None, description="SHA-256 of the artifact.", examples=["e133ed4b50844360"])
    size: int | None = Field(None, description="Size of the artifact in bytes.", examples=[472])
    created_at: datetime | None = Field(None, examples=["2026-11-21T02:52:11Z"])
    pruned_at: datetime | None = Field(
        None,
        description="When its artifact and report were deleted, if so.",
        examples=["2026-12-21T02:52:11Z"],
    )


class Calibrators(Document):
    """Some calibrators, newest first."""

    calibrators: tuple[CalibratorDocument, ...]


class Activated(Document):
    """The active calibrator."""

    version: int = Field(examples=[1])
    method: str = Field(examples=["ts"])
    reason: Annotated[Literal["fit", "request", "rollback", "refit"], MayGrow] = Field(
        description="Reason of the activation."
    )
    activated_at: datetime = Field(examples=["2026-11-21T03:00:00Z"])


class Activations(Document):
    """The newest activations, and where a rollback leads."""

    activations: tuple[Activated, ...]
    rollback_to: int | None = Field(description="Version that a rollback activates; null if there is none.")
