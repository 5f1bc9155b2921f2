"""The bodies that `POST /feedback` reads, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from boxcal.app.monitoring.items import MAX_ITEMS
from boxcal.app.predict.bodies import JSON

CSV, PARQUET = "text/csv", "application/vnd.apache.parquet"
TABLES = (CSV, PARQUET)

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
