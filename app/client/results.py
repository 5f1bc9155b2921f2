"""What the service answers, as frozen typed values: the last step of every call of the client.

Members that a newer service adds are kept (`model_extra`) and never break an older client.
"""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "Activation",
    "Answer",
    "BackboneName",
    "CalibratorName",
    "CalibratorRecord",
    "Fit",
    "FitWarning",
    "Health",
    "LabelProbability",
    "Prediction",
]

ActivatePolicy = Literal["if_better", "always", "never"]
FitState = Literal["queued", "running", "succeeded", "failed", "cancelled", "interrupted"]


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="allow")


class CalibratorName(_Result):
    """Which calibrator gave an answer: its version (0 is `uncalibrated`) and its method."""

    version: int
    method: str


class LabelProbability(_Result):
    """One class of an answer; `bound` says which of its bounds holds the probability, if any does."""

    label: str
    index: int
    probability: float
    bound: Literal["lower", "upper"] | None = None


class Prediction(_Result):
    """The answer for one input; `probabilities` and `logits` (K numbers each) are there when asked for."""

    label: str
    index: int
    probability: float
    top: tuple[LabelProbability, ...] = ()
    probabilities: tuple[float, ...] | None = None
    logits: tuple[float, ...] | None = None


class Answer(_Result):
    """What `/predict` and `/calibrate` answer, one prediction for each input, in the order sent."""

    model: str
    calibrator: CalibratorName
    bounds_relaxed: bool
    predictions: tuple[Prediction, ...]
    timing_ms: dict[str, float] = Field(default_factory=dict)


class FitWarning(_Result):
    """What is probably wrong with the data of a fit; a `serious` one keeps its calibrator from activation."""

    code: str
    severity: Literal["warning", "serious"]
    message: str
    rows: int


class Fit(_Result):
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


class BackboneName(_Result):
    """What a calibrator was fitted to; `fingerprint` is the SHA-256 of the weights."""

    name: str
    num_classes: int
    fingerprint: str


class CalibratorRecord(_Result):
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


class Activation(_Result):
    """What an activation or a rollback activated, and why."""

    version: int
    method: str
    reason: Literal["fit", "request", "rollback"] | None = None
    activated_at: datetime | None = None


class Health(_Result):
    """The answer of a health route; `ready` is False while the service starts or stops."""

    ready: bool
    status: str = ""
    model: str | None = None
    calibrator: int | None = None
