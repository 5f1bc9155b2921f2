"""Rows of a table of true labels, as items of `POST /feedback`: for the service and for `boxcal feedback`.

What is wrong with the table is refused here; what is wrong with a row, the service says, as for JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import orjson
from pyarrow import types

from boxcal.app.http.problems import MalformedBody
from boxcal.app.tables.formats import OpenTable

COLUMNS = ("id", "label", "propensity", "source", "key", "logits")
ROWS_AT_ONCE = 1000


def label_rows(table: OpenTable) -> Iterator[dict[str, Any]]:
    _check_columns(table)
    for batch in table.batches(table.names, (), ROWS_AT_ONCE):
        for row in batch.to_pylist():
            item = {name: value for name, value in row.items() if value not in (None, "")}
            yield item if table.schema is not None else _typed(item)


def _typed(item: dict[str, Any]) -> dict[str, Any]:
    """Convert the texts of a row of CSV; what is no number stays, for the service to name."""
    with suppress(ValueError):
        if "propensity" in item:
            item["propensity"] = float(item["propensity"])
        if "logits" in item:
            item["logits"] = orjson.loads(item["logits"])
    return item


def _check_columns(table: OpenTable) -> None:
    found = set(table.names)
    is_complete = "label" in found and ("id" in found or {"key", "logits"} <= found)
    if not is_complete or len(found) < len(table.names) or not found <= set(COLUMNS):
        raise MalformedBody(
            f"The table has the columns {table.names!r:.200}; it needs label and id (or key and logits), and "
            "may have propensity and source."
        )
    for field in table.schema or ():
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        is_text = types.is_string(kind) or types.is_large_string(kind)
        is_list = types.is_list(kind) or types.is_large_list(kind)
        is_right = {
            "logits": is_list and types.is_floating(kind.value_type),
            "label": is_text or types.is_integer(kind) or types.is_floating(kind),
            "propensity": types.is_integer(kind) or types.is_floating(kind),
        }
        if not (is_right.get(field.name, is_text) or types.is_null(kind)):
            raise MalformedBody(f"The column `{field.name}` has the type {field.type!s:.100}.")
