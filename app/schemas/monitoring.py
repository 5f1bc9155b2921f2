"""Documents of feedback and of the monitor."""

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from boxcal.app.schemas import Document, MayGrow


class FeedbackProblem(Document):
    """An item that was not used."""

    index: int = Field(description="Position of the item.", examples=[0])
    id: str | None = Field(None, examples=["01936d8f2b7c4d0e9a5f6b1c2d3e4f50"])
    reason: Annotated[Literal["unknown", "expired", "malformed"], MayGrow]
    detail: str = Field(examples=["No prediction has this id."])


class Feedback(Document):
    """What became of the items."""

    seq: int = Field(description="Number of the log up to which `GET /monitor` includes these labels.")
    accepted: int = Field(description="Labels stored.", examples=[1])
    duplicates: int = Field(description="Labels that were known already.", examples=[0])
    conflicts: int = Field(
        description="Labels that differ from an earlier one: tests keep the first, refits use the latest."
    )
    unknown: int = Field(description="Ids that no prediction has.", examples=[1])
    expired: int = Field(description="Ids of predictions that are no longer kept.", examples=[0])
    malformed: int = Field(description="Items that could not be read.", examples=[0])
    problems: tuple[FeedbackProblem, ...] = Field(
        (), description="The first 100 items that were not used, and why."
    )


class Alarm(Document):
    """One of the two tests of the active calibrator."""

    alarm: bool = Field(description="Whether it was ever raised since the test began.")
    log_evidence: float | None = Field(None, description="Natural logarithm of the evidence now.")
    largest_log_evidence: float | None = Field(None, description="Its largest value.", examples=[13.1])
    threshold: float = Field(description="Log evidence from which the alarm is raised.", examples=[4.61])
    alpha: float = Field(description="Largest probability of a false alarm, ever.", examples=[0.01])


class EvidenceSeries(Document):
    """The log evidence of both tests since they began, at up to 128 numbers of labels."""

    labels: tuple[int, ...] = Field(description="Labels since the test began.", examples=[[50, 100]])
    strict: tuple[float | None, ...] = Field(examples=[[-0.21, 0.35]])
    material: tuple[float | None, ...] = Field(examples=[[-0.4, -0.32]])


class MonitorDiagnosis(Document):
    """What has changed."""

    kind: str = Field(
        description="`overconfident`, `underconfident`, `label_shift`, `class_bias`, `classes`, "
        "`confidence_range` or `none`.",
        examples=["overconfident"],
    )
    classes: tuple[str, ...] = Field(description="The classes that changed most.", examples=[["9"]])
    confidence: tuple[float, float] | None = Field(
        None, description="The range of confidence that changed most.", examples=[[0.8, 0.9]]
    )
    since: int = Field(description="How many labels ago the change began.", examples=[640])
    began_at: float | None = Field(None, description="When, in seconds since 1970.", examples=[1795316400.0])
    recoverable_nll: float = Field(description="NLL in nats a label that a recalibration would recover.")
    recoverable_nll_lower: float = Field(description="A lower bound of it, at the level .01.")


class ExpectedAccuracy(Document):
    """The expected share of right answers."""

    value: float = Field(examples=[0.914])
    basis: Literal["validation", "labels"] = Field(
        description="`validation`: from confidence alone, blind to a change of what inputs mean."
    )
    low: float | None = Field(None, description="Lower end of a 95 % interval; null without labels.")
    high: float | None = Field(None, examples=[0.927])


class DriftState(Document):
    """The test whether the confidences are exchangeable since the calibrator became active."""

    alarm: bool
    log_evidence: float | None = Field(None, examples=[-1.2])


class LogState(Document):
    """The feedback log."""

    seq: int = Field(description="Its last number.", examples=[4200])
    rows: int = Field(description="Predictions that are kept.", examples=[2100])
    sources: dict[str, int] = Field(
        description="Labels that are kept, by the most frequent sources.", examples=[{"audit": 12}]
    )


class MonitoredCalibrator(Document):
    """The calibrator that is active."""

    version: int = Field(examples=[1])
    method: str = Field(examples=["ts"])


class MonitorState(Document):
    """What the monitor knows; members without a value are omitted before the first label."""

    sentence: str = Field(
        description="What the numbers mean.",
        examples=["Version 1 is no longer calibrated: the answers are too confident."],
    )
    seq: int = Field(0, description="Number of the log up to which it is folded.", examples=[4200])
    calibrator: MonitoredCalibrator | None = None
    labels: int = Field(0, description="Labels of this calibrator since its test began.", examples=[2100])
    skipped: int = Field(0, description="Entries of other calibrators, which are not active.", examples=[0])
    alarms: dict[Literal["strict", "material"], Alarm] | None = Field(
        None,
        description="`strict`: calibration is not exact; a refit begins. `material`: a recalibration would "
        "recover more than .005 nats a label; a person should look.",
    )
    evidence: EvidenceSeries | None = Field(None, description="How the evidence came about.")
    diagnosis: MonitorDiagnosis | None = None
    metrics: dict[str, float | None] | None = Field(
        None,
        description="Metrics of the labels since the calibrator became active; NLL, of 0.9999 p + 0.0001/K, "
        "with an interval.",
        examples=[{"nll": 0.31}],
    )
    expected_accuracy: ExpectedAccuracy | None = None
    drift: DriftState | None = None
    phase: Literal["watching", "fitting", "duel", "proposed"] = Field(
        "watching", description="What the refit loop waits for."
    )
    challenger: int | None = Field(None, description="The version in the duel, or proposed.", examples=[2])
    refit_in: int | None = Field(
        None,
        description="Labels that the next refit waits for, if the change lasts; omitted without a strict "
        "alarm, during a refit and with `BOXCAL_AUTO_REFIT=off`.",
        examples=[360],
    )
    acknowledged_at: str | None = Field(None, examples=["2026-11-22T03:00:00Z"])
    log: LogState


class AcknowledgeRequest(BaseModel):
    """An acknowledgement."""

    model_config = ConfigDict(extra="forbid")

    note: str | None = Field(
        None, max_length=500, description="Why, for the record.", examples=["A camera was replaced."]
    )


class MonitorEvent(Document):
    """Something that the monitor decided or was told."""

    id: int = Field(examples=[3])
    kind: str = Field(description="Such as `alarm`, `refit`, `duel_won` or `activated`.", examples=["alarm"])
    created_at: datetime = Field(examples=["2026-11-22T03:00:00Z"])
    sentence: str = Field(
        description="What it means, and what a person can do.",
        examples=["Version 1 is not calibrated any more."],
    )
    version: int = Field(description="The active version.", examples=[1])
    labels: int = Field(description="Labels that the monitor had seen.", examples=[2100])
    evidence: dict[str, Any] = Field(examples=[{"log_evidence": 4.7}])


class RefitDecisions(Document):
    """Decisions, newest first."""

    decisions: tuple[MonitorEvent, ...]
