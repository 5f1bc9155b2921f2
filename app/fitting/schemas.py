"""How a fit looks over HTTP."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from boxcal.app.registry.records import ActivatePolicy, FitRecord, FitState


class FitWarning(BaseModel):
    """What is probably wrong with the data of a fit, or with its method for these data."""

    code: str = Field(description="A stable name of the finding, such as `duplicates`.")
    severity: Literal["warning", "serious"] = Field(
        description="`serious`: the calibrator is not activated unless `activate` is `always`."
    )
    message: str
    rows: int = Field(description="How many rows are concerned.")


class Fit(BaseModel):
    """How a fit stands; members that are not known yet are left out."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    state: FitState
    progress: float = Field(ge=0, le=1)
    stage: str = Field(description="What is being done.")
    method: str = Field(description="What was asked for; the calibrator names what `auto` chose.")
    activate: ActivatePolicy
    samples: int = Field(description="Size of the validation set.")
    calibrator: int | None = Field(None, description="The version that the fit made.")
    activated: bool | None = Field(None, description="Whether that version was activated.")
    decision: str | None = Field(None, description="Why it was, or was not.")
    warnings: list[FitWarning] | None = Field(None, description="What is probably wrong with the data.")
    error: str | None = Field(None, description="Why the fit failed, was cancelled or was interrupted.")
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None

    @classmethod
    def of(cls, record: FitRecord) -> Self:
        """Show a record."""
        return cls.model_validate(record)


class Fits(BaseModel):
    """The newest fits, newest first."""

    fits: list[Fit]
