"""Schemas of fits in the HTTP API."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from boxcal.app.registry.records import ActivatePolicy, FitRecord, FitState


class FitWarning(BaseModel):
    """A probable problem of the data of a fit, or of its method for these data."""

    code: str = Field(description="Stable identifier, for example `duplicates`.")
    severity: Literal["warning", "serious"] = Field(
        description="`serious`: the calibrator is not activated unless `activate` is `always`."
    )
    message: str
    rows: int = Field(description="Number of affected rows.")


class Fit(BaseModel):
    """The state of a fit; members without a value are omitted."""

    model_config = ConfigDict(from_attributes=True)

    id: str
    state: FitState
    progress: float = Field(ge=0, le=1)
    stage: str = Field(description="Current step.")
    method: str = Field(
        description="Requested method; if it is `auto`, the calibrator has the selected method."
    )
    activate: ActivatePolicy
    samples: int = Field(description="Size of the validation set.")
    calibrator: int | None = Field(None, description="Version of the new calibrator.")
    activated: bool | None = Field(None, description="Whether this version was activated.")
    decision: str | None = Field(None, description="Reason for this decision.")
    warnings: list[FitWarning] | None = Field(None, description="Probable problems of the data.")
    error: str | None = Field(None, description="Why the fit failed, was cancelled or was interrupted.")
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None

    @classmethod
    def of(cls, record: FitRecord) -> Self:
        """Return the schema of a record."""
        return cls.model_validate(record)


class Interval(BaseModel):
    """A difference with its 95 % interval; null where it is infinite."""

    value: float | None
    low: float | None
    high: float | None


class Score(BaseModel):
    """One metric of one row."""

    value: float | None
    standard_error: float | None
    change: Interval | None = Field(
        description="This row less its base, paired by sample: below 0 is better."
    )
    improves: bool | None = Field(description="Whether it is lower than that of the base.")
    clear: bool = Field(description="Whether the interval does not contain 0.")


class ComparedRow(BaseModel):
    """A version, which is evaluated as it is, or a method, which is cross-fitted."""

    method: str
    base: str | None = Field(description="The row that it is compared with.")
    metrics: dict[str, Score]
    changed_labels: int = Field(description="Samples whose label is not that of the logits.")
    fit_seconds: float


class Comparison(BaseModel):
    """Versions and methods on the same samples."""

    sentences: list[str] = Field(description="How each version differs from the one it is compared with.")
    warnings: list[FitWarning]
    fit_samples: int = Field(description="N.")
    classes: int
    folds: int
    methods: list[ComparedRow]
    left_out: dict[str, str] = Field(description="Methods that could not be fitted, and why.")


class Fits(BaseModel):
    """Recent fits, newest first."""

    fits: list[Fit]
