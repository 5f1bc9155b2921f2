"""What the service answers, as frozen typed values: the last step of every call of the client.

Members that a newer service adds are kept (`model_extra`) and never break an older client.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = [
    "Activation",
    "Answer",
    "CalibratorName",
    "CalibratorRecord",
    "Fit",
    "FitState",
    "Health",
    "LabelProbability",
    "Prediction",
]

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


class Fit(_Result):
    """A fit's state; `calibrator` and `activated` are known once it has succeeded."""

    id: str
    state: FitState
    progress: float = 0.0
    stage: str | None = None
    calibrator: int | None = None
    activated: bool | None = None
    error: str | dict[str, Any] | None = None

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

    @property
    def error_text(self) -> str | None:
        """The reason of a fit that did not succeed, as one line."""
        if isinstance(self.error, dict):
            return str(self.error.get("detail") or self.error.get("title") or self.error)
        return self.error


class CalibratorRecord(_Result):
    """A calibrator in the registry; exactly one is active."""

    version: int
    method: str
    active: bool


class Activation(_Result):
    """What an activation or a rollback put in force."""

    version: int
    method: str


class Health(_Result):
    """The answer of a health route; `ready` is False while the service starts or stops."""

    ready: bool
    status: str = ""
