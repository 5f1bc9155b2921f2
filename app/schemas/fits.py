"""Documents of fits and comparisons."""

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from boxcal.app.schemas import Document

ActivatePolicy = Literal["if_better", "always", "never"]
FitState = Literal["queued", "running", "succeeded", "failed", "cancelled", "interrupted"]


class FitWarning(Document):
    """A probable problem of the data of a fit, or of its method for these data."""

    code: str = Field(description="Stable identifier, for example `duplicates`.")
    severity: Literal["warning", "serious"] = Field(
        description="`serious`: the calibrator is not activated unless `activate` is `always`."
    )
    message: str
    rows: int = Field(description="Number of affected rows.")


class Fit(Document):
    """The state of a fit; members without a value are omitted."""

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
    warnings: Annotated[tuple[FitWarning, ...], BeforeValidator(lambda found: found or ())] = Field(
        (), description="Probable problems of the data."
    )
    error: str | None = Field(None, description="Why the fit failed, was cancelled or was interrupted.")
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None

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

    value: float | None
    low: float | None
    high: float | None


class ComparedMetric(Document):
    """One metric of one row."""

    value: float | None
    standard_error: float | None
    change: DifferenceInterval | None = Field(
        description="This row less its base, paired by sample: below 0 is better."
    )
    improves: bool | None = Field(description="Whether it is lower than that of the base.")
    clear: bool = Field(description="Whether the interval does not contain 0.")


class ComparedRow(Document):
    """A version, which is evaluated as it is, or a method, which is cross-fitted."""

    method: str
    base: str | None = Field(description="The row that it is compared with.")
    metrics: dict[str, ComparedMetric]
    changed_labels: int = Field(description="Samples whose label is not that of the logits.")
    fit_seconds: float


class ComparisonDocument(Document):
    """Versions and methods on the same samples."""

    sentences: tuple[str, ...] = Field(description="How each version differs from its reference.")
    warnings: tuple[FitWarning, ...]
    fit_samples: int = Field(description="N.")
    classes: int
    folds: int
    methods: tuple[ComparedRow, ...]
    left_out: dict[str, str] = Field(description="Methods that could not be fitted, and why.")


class Fits(Document):
    """Recent fits, newest first."""

    fits: tuple[Fit, ...]
