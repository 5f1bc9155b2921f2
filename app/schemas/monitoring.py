"""Documents of feedback and of the monitor."""

from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from boxcal.app.schemas import Document


class FeedbackProblem(Document):
    """An item that was not used."""

    index: int = Field(description="Position of the item.")
    id: str | None = None
    reason: Literal["unknown", "expired", "malformed"]
    detail: str


class Feedback(Document):
    """What became of the items."""

    seq: int = Field(description="Number of the log up to which `GET /monitor` includes these labels.")
    accepted: int = Field(description="Labels stored.")
    duplicates: int = Field(description="Labels that were known already.")
    conflicts: int = Field(
        description="Labels that differ from an earlier one: tests keep the first, refits use the latest."
    )
    unknown: int = Field(description="Ids that no prediction has.")
    expired: int = Field(description="Ids of predictions that are no longer kept.")
    malformed: int = Field(description="Items that could not be read.")
    problems: tuple[FeedbackProblem, ...] = Field(
        (), description="The first 100 items that were not used, and why."
    )


class Alarm(Document):
    """One of the two tests of the active calibrator."""

    alarm: bool = Field(description="Whether it was ever raised since the test began.")
    log_evidence: float | None = Field(None, description="Natural logarithm of the evidence now.")
    largest_log_evidence: float | None = Field(None, description="Its largest value.")
    threshold: float = Field(description="Log evidence from which the alarm is raised.")
    alpha: float = Field(description="Largest probability of a false alarm, ever.")


class EvidenceSeries(Document):
    """The log evidence of both tests since they began, at up to 128 numbers of labels."""

    labels: tuple[int, ...] = Field(description="Labels since the test began.")
    strict: tuple[float | None, ...]
    material: tuple[float | None, ...]


class MonitorDiagnosis(Document):
    """What has changed."""

    kind: str = Field(
        description="`overconfident`, `underconfident`, `label_shift`, `class_bias`, `classes`, "
        "`confidence_range` or `none`."
    )
    classes: tuple[str, ...] = Field(description="The classes that changed most.")
    confidence: tuple[float, float] | None = Field(
        None, description="The range of confidence that changed most."
    )
    since: int = Field(description="How many labels ago the change began.")
    began_at: float | None = Field(None, description="When, in seconds since 1970.")
    recoverable_nll: float = Field(description="NLL in nats a label that a recalibration would recover.")
    recoverable_nll_lower: float = Field(description="A lower bound of it, at the level .01.")


class ExpectedAccuracy(Document):
    """The expected share of right answers."""

    value: float
    basis: Literal["validation", "labels"] = Field(
        description="`validation`: from confidence alone, blind to a change of what inputs mean."
    )
    low: float | None = Field(None, description="Lower end of a 95 % interval; null without labels.")
    high: float | None = None


class DriftState(Document):
    """The test whether the confidences are exchangeable since the calibrator became active."""

    alarm: bool
    log_evidence: float | None = None


class LogState(Document):
    """The feedback log."""

    seq: int = Field(description="Its last number.")
    rows: int = Field(description="Predictions that are kept.")
    sources: dict[str, int] = Field(description="Labels that are kept, by the most frequent sources.")


class MonitoredCalibrator(Document):
    """The calibrator that is active."""

    version: int
    method: str


class MonitorState(Document):
    """What the monitor knows; members without a value are omitted before the first label."""

    sentence: str = Field(description="What the numbers mean.")
    seq: int = Field(0, description="Number of the log up to which it is folded.")
    calibrator: MonitoredCalibrator | None = None
    labels: int = Field(0, description="Labels of this calibrator since its test began.")
    skipped: int = Field(0, description="Entries of other calibrators, which are not active.")
    alarms: dict[Literal["strict", "material"], Alarm] | None = Field(
        None,
        description="`strict`: calibration is not exact; a refit begins. `material`: a recalibration would "
        "recover more than .005 nats a label; a person should look.",
    )
    evidence: EvidenceSeries | None = Field(None, description="How the evidence came about.")
    diagnosis: MonitorDiagnosis | None = None
    metrics: dict[str, float | None] | None = Field(
        None, description="Metrics of the labels since the calibrator became active; NLL with an interval."
    )
    expected_accuracy: ExpectedAccuracy | None = None
    drift: DriftState | None = None
    phase: Literal["watching", "fitting", "duel", "proposed"] = Field(
        "watching", description="What the refit loop waits for."
    )
    challenger: int | None = Field(None, description="The version in the duel, or proposed.")
    acknowledged_at: str | None = None
    log: LogState


class AcknowledgeRequest(BaseModel):
    """An acknowledgement."""

    model_config = ConfigDict(extra="forbid")

    note: str | None = Field(None, max_length=500, description="Why, for the record.")


class MonitorEvent(Document):
    """Something that the monitor decided or was told."""

    id: int
    kind: str = Field(description="Such as `alarm`, `refit`, `duel_won` or `activated`.")
    created_at: datetime
    sentence: str = Field(description="What it means, and what a person can do.")
    version: int = Field(description="The active version.")
    labels: int = Field(description="Labels that the monitor had seen.")
    evidence: dict[str, Any]


class RefitDecisions(Document):
    """Decisions, newest first."""

    decisions: tuple[MonitorEvent, ...]
