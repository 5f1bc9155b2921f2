"""What the service answers, as frozen typed values: the last step of every call of the client.

Members that a newer service adds are kept (`model_extra`) and never break an older client.
"""

from datetime import datetime
from typing import Any, Literal

from boxcal.app.http.responses import Answer, CalibratorName, Document, LabelProbability, Prediction

__all__ = [
    "Activation",
    "Answer",
    "BackboneName",
    "CalibratorName",
    "CalibratorRecord",
    "Feedback",
    "FeedbackProblem",
    "Fit",
    "FitWarning",
    "Health",
    "LabelProbability",
    "Prediction",
]

ActivatePolicy = Literal["if_better", "always", "never"]
FitState = Literal["queued", "running", "succeeded", "failed", "cancelled", "interrupted"]


class FitWarning(Document):
    """What is probably wrong with the data of a fit; a `serious` one keeps its calibrator from activation."""

    code: str
    severity: Literal["warning", "serious"]
    message: str
    rows: int


class Fit(Document):
    """A fit's state.

    Attributes
    ----------
    progress, stage
        Share of the work done, 0 to 1, and what is being done.
    method
        What was asked for; the calibrator names what `auto` chose.
    calibrator, activated, decision
        Once it has succeeded: the version it made, whether that was activated, and why or why not.
    warnings
        Once it has succeeded: what is probably wrong with the data.
    error
        Why it failed, was cancelled or was interrupted.
    """

    id: str
    state: FitState
    progress: float = 0.0
    stage: str | None = None
    method: str | None = None
    activate: ActivatePolicy | None = None
    samples: int | None = None
    calibrator: int | None = None
    activated: bool | None = None
    decision: str | None = None
    warnings: tuple[FitWarning, ...] = ()
    error: str | None = None
    created_at: datetime | None = None
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


class BackboneName(Document):
    """What a calibrator was fitted to; `fingerprint` is the SHA-256 of the weights."""

    name: str
    num_classes: int
    fingerprint: str


class CalibratorRecord(Document):
    """A calibrator in the registry; exactly one is active, and version 0 was never fitted.

    Attributes
    ----------
    spec
        The fitted parameters.
    samples
        Size of the validation set.
    sha256, size
        Of the artifact, in bytes.
    """

    version: int
    method: str
    active: bool
    backbone: BackboneName | None = None
    spec: dict[str, Any] | None = None
    samples: int | None = None
    sha256: str | None = None
    size: int | None = None
    created_at: datetime | None = None


class FeedbackProblem(Document):
    """An item of feedback that was not used; `index` is its position."""

    index: int
    id: str | None = None
    reason: Literal["unknown", "expired", "malformed"]
    detail: str


class Feedback(Document):
    """What became of labels that were sent.

    Attributes
    ----------
    seq
        Number of the log up to which the monitor includes these labels.
    accepted, duplicates, conflicts
        Labels stored, known already, and different from an earlier one.
    unknown, expired, malformed
        Items that were not used.
    problems
        The first of those items, and why.
    """

    seq: int
    accepted: int
    duplicates: int
    conflicts: int
    unknown: int
    expired: int
    malformed: int
    problems: tuple[FeedbackProblem, ...] = ()


class Activation(Document):
    """What an activation or a rollback activated, and why."""

    version: int
    method: str
    reason: Literal["fit", "request", "rollback", "refit"] | None = None
    activated_at: datetime | None = None


class Health(Document):
    """The answer of a health route; `ready` is False while the service starts or stops."""

    ready: bool
    status: str = ""
    model: str | None = None
    calibrator: int | None = None
