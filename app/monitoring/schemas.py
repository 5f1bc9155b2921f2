"""Schemas of feedback and of the monitor in the HTTP API."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from boxcal.app.monitoring import events
from boxcal.app.monitoring.items import MAX_ITEMS
from boxcal.app.monitoring.records import Outcome
from boxcal.app.predict.bodies import JSON

CSV, PARQUET = "text/csv", "application/vnd.apache.parquet"
TABLES = (CSV, PARQUET)
SHOWN_PROBLEMS = 100

LABEL = {
    "anyOf": [{"type": "string"}, {"type": "integer", "minimum": 0}],
    "description": "Name or index of the true class.",
}
PROPENSITY = {
    "type": ["number", "null"],
    "exclusiveMinimum": 0,
    "maximum": 1,
    "description": "Probability with which this prediction was chosen to be labelled.",
}
SOURCE = {"type": ["string", "null"], "description": "Who or what labelled it."}
ITEMS = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_ITEMS,
    "items": {
        "type": "object",
        "required": ["label"],
        "properties": {
            "id": {"type": "string", "description": "Of the prediction."},
            "label": LABEL,
            "propensity": PROPENSITY,
            "source": SOURCE,
            "logits": {
                "type": "array",
                "items": {"type": "number"},
                "description": "K logits of a prediction that this service did not make; instead of `id`.",
            },
            "key": {"type": "string", "description": "Identifies an item with `logits`."},
        },
    },
}
COLUMNS = "Columns with the names of the members of an item."
BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {
                "schema": {
                    "type": "object",
                    "required": ["items"],
                    "additionalProperties": False,
                    "properties": {"items": ITEMS},
                }
            },
            CSV: {"schema": {"type": "string", "description": COLUMNS}},
            PARQUET: {"schema": {"type": "string", "format": "binary", "description": COLUMNS}},
        },
    }
}


class FeedbackProblem(BaseModel):
    """An item that was not used."""

    model_config = ConfigDict(from_attributes=True)

    index: int = Field(description="Position of the item.")
    id: str | None = None
    reason: Literal["unknown", "expired", "malformed"]
    detail: str


class Feedback(BaseModel):
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
    problems: list[FeedbackProblem] = Field(
        description=f"The first {SHOWN_PROBLEMS} items that were not used, and why."
    )

    @classmethod
    def of(cls, outcome: Outcome) -> Self:
        """Return the schema of an outcome."""
        return cls(
            seq=outcome.seq,
            accepted=outcome.accepted,
            duplicates=outcome.duplicates,
            conflicts=outcome.conflicts,
            unknown=outcome.count("unknown"),
            expired=outcome.count("expired"),
            malformed=outcome.count("malformed"),
            problems=[FeedbackProblem.model_validate(one) for one in outcome.problems[:SHOWN_PROBLEMS]],
        )


class Alarm(BaseModel):
    """One of the two tests of the active calibrator."""

    alarm: bool = Field(description="Whether it was ever raised since the test began.")
    log_evidence: float | None = Field(None, description="Natural logarithm of the evidence now.")
    largest_log_evidence: float | None = Field(None, description="Its largest value.")
    threshold: float = Field(description="Log evidence from which the alarm is raised.")
    alpha: float = Field(description="Largest probability of a false alarm, ever.")


class EvidenceSeries(BaseModel):
    """The log evidence of both tests since they began, at up to 128 numbers of labels."""

    labels: list[int] = Field(description="Labels since the test began.")
    strict: list[float | None]
    material: list[float | None]


class MonitorDiagnosis(BaseModel):
    """What has changed."""

    kind: str = Field(
        description="`overconfident`, `underconfident`, `label_shift`, `class_bias`, `classes`, "
        "`confidence_range` or `none`."
    )
    classes: list[str] = Field(description="The classes that changed most.")
    confidence: tuple[float, float] | None = Field(
        None, description="The range of confidence that changed most."
    )
    since: int = Field(description="How many labels ago the change began.")
    began_at: float | None = Field(None, description="When, in seconds since 1970.")
    recoverable_nll: float = Field(description="NLL in nats a label that a recalibration would recover.")
    recoverable_nll_lower: float = Field(description="A lower bound of it, at the level .01.")


class ExpectedAccuracy(BaseModel):
    """The expected share of right answers."""

    value: float
    basis: Literal["validation", "labels"] = Field(
        description="`validation`: from confidence alone, blind to a change of what inputs mean."
    )
    low: float | None = Field(None, description="Lower end of a 95 % interval; null without labels.")
    high: float | None = None


class DriftState(BaseModel):
    """The test whether the confidences are exchangeable since the calibrator became active."""

    alarm: bool
    log_evidence: float | None = None


class LogState(BaseModel):
    """The feedback log."""

    seq: int = Field(description="Its last number.")
    rows: int = Field(description="Predictions that are kept.")
    sources: dict[str, int] = Field(description="Labels that are kept, by the most frequent sources.")


class MonitoredCalibrator(BaseModel):
    """The calibrator that is active."""

    version: int
    method: str


class MonitorState(BaseModel):
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


class MonitorEvent(BaseModel):
    """Something that the monitor decided or was told."""

    id: int
    kind: str = Field(description="Such as `alarm`, `refit`, `duel_won` or `activated`.")
    created_at: datetime
    sentence: str = Field(description="What it means, and what a person can do.")
    version: int = Field(description="The active version.")
    labels: int = Field(description="Labels that the monitor had seen.")
    evidence: dict[str, Any]

    @classmethod
    def of(cls, event: events.StoredEvent) -> Self:
        """Return the schema of an event."""
        return cls(id=event.id, kind=event.kind, created_at=event.created_at, **event.document)


class RefitDecisions(BaseModel):
    """Decisions, newest first."""

    decisions: list[MonitorEvent]
