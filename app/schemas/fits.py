"""Documents of fits and comparisons."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from boxcal.app.schemas import Document, MayGrow

ActivatePolicy = Literal["if_better", "always", "never"]
FitState = Literal["queued", "running", "succeeded", "failed", "cancelled", "interrupted"]


class FitWarning(Document):
    """A probable problem of the data of a fit, or of its method for these data."""

    code: str = Field(description="Stable identifier, for example `duplicates`.", examples=["duplicates"])
    severity: Annotated[Literal["warning", "serious"], MayGrow] = Field(
        description="`serious`: the calibrator is not activated unless `activate` is `always`."
    )
    message: str = Field(examples=["12 rows occur more than once."])
    rows: int = Field(description="Number of affected rows.", examples=[12])


class Fit(Document):
    """The state of a fit; members without a value are omitted."""

    id: str = Field(examples=["fc6636e3d795a8bb"])
    state: Annotated[FitState, MayGrow] = Field(examples=["succeeded"])
    progress: float = Field(ge=0, le=1, examples=[1.0])
    stage: str = Field(description="Current step.", examples=["done"])
    method: str = Field(
        description="Requested method; if it is `auto`, the calibrator has the selected method.",
        examples=["auto"],
    )
    activate: Annotated[ActivatePolicy, MayGrow]
    samples: int = Field(description="Size of the validation set.", examples=[539])
    calibrator: int | None = Field(None, description="Version of the new calibrator.", examples=[1])
    activated: bool | None = Field(None, description="Whether this version was activated.")
    decision: str | None = Field(
        None, description="Reason for this decision.", examples=["Activated: NLL is significantly lower."]
    )
    warnings: Annotated[tuple[FitWarning, ...], BeforeValidator(lambda found: found or ())] = Field(
        (), description="Probable problems of the data."
    )
    error: str | None = Field(
        None,
        description="Why the fit failed, was cancelled or was interrupted.",
        examples=["Cancelled on request."],
    )
    created_at: datetime = Field(examples=["2026-11-21T02:51:59Z"])
    started_at: datetime | None = Field(None, examples=["2026-11-21T02:52:00Z"])
    finished_at: datetime | None = Field(None, examples=["2026-11-21T02:52:11Z"])

    @property
    def done(self) -> bool:
        """Whether the state can no longer change."""
        return self.state not in ("queued", "running")

    @property
    def version(self) -> int:
        """The calibrator of a fit that succeeded; ValueError for any other."""
        if self.calibrator is None:
            raise ValueError(f"fit {self.id} is {self.state} and has no calibrator")
        return self.calibrator


class DifferenceInterval(Document):
    """A difference with its 95 % interval; null where it is infinite."""

    value: float | None = Field(examples=[-0.097])
    low: float | None = Field(examples=[-0.157])
    high: float | None = Field(examples=[-0.052])


class ComparedMetric(Document):
    """One metric of one row."""

    value: float | None = Field(examples=[0.257])
    standard_error: float | None = Field(examples=[0.03])
    change: DifferenceInterval | None = Field(
        description="This row less its base, paired by sample: below 0 is better."
    )
    improves: bool | None = Field(description="Whether it is lower than that of the base.")
    clear: bool = Field(description="Whether the interval does not contain 0.")


class ComparedRow(Document):
    """A version, which is evaluated as it is, or a method, which is cross-fitted."""

    method: str = Field(examples=["version 2 (pb)"])
    base: str | None = Field(description="The row that it is compared with.", examples=["version 1 (ts)"])
    metrics: dict[str, ComparedMetric]
    changed_labels: int = Field(description="Samples whose label is not that of the logits.", examples=[0])
    fit_seconds: float = Field(examples=[0.1])


class ComparisonDocument(Document):
    """Versions and methods on the same samples."""

    sentences: tuple[str, ...] = Field(
        description="How each version differs from its reference.",
        examples=[["Version 2 (pb), compared with version 1 (ts): NLL is clearly lower."]],
    )
    warnings: tuple[FitWarning, ...]
    fit_samples: int = Field(description="N.", examples=[539])
    classes: int = Field(examples=[10])
    folds: int = Field(examples=[5])
    methods: tuple[ComparedRow, ...]
    left_out: dict[str, str] = Field(
        description="Methods that could not be fitted, and why.", examples=[{"vs": "It did not converge."}]
    )


class Fits(Document):
    """Recent fits, newest first."""

    fits: tuple[Fit, ...]
