"""Schemas of feedback and of the monitor in the HTTP API."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from boxcal.app.monitoring.items import COLUMNS, MAX_ITEMS
from boxcal.app.monitoring.records import Outcome
from boxcal.app.predict.bodies import JSON

CSV = "text/csv"
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
            CSV: {"schema": {"type": "string", "description": f"Columns {', '.join(COLUMNS)}."}},
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
