"""Rows of a table of true labels, as items of `POST /feedback`: for the service and for `boxcal feedback`.

What is wrong with the table is refused here; what is wrong with a row, the service says, as for JSON.

The memory of a worker is limited, and orjson ends a process that gets none with SIGSEGV: it reserves 280
bytes for each number of a list before it writes one. The `json` of Python raises `MemoryError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from boxcal.app.http.problems import MalformedBody, UploadTooLarge
from boxcal.app.tables.columns import INDEX
from boxcal.app.tables.formats import OpenTable
from boxcal.app.tables.values import is_text, with_points, without_decimals
from boxcal.calibrators.class_columns import clean

COLUMNS = ("id", "label", "propensity", "source", "key", "logits")
ROWS_AT_ONCE = 1000
BYTES_AT_ONCE = 2**20
MAX_CELL_BYTES = 2**19
"""26 for each of 20,000 classes."""


def label_rows(table: OpenTable) -> Iterator[dict[str, Any]]:
    given = [name for name in table.names if not INDEX.fullmatch(clean(name))]
    names = [clean(name) for name in given]
    _check_columns(table, given)
    first = 1
    for read in table.batches(given, (), ROWS_AT_ONCE):
        columns = [
            with_points(read, name) if clean(name) == "propensity" else without_decimals(read.column(name))
            for name in given
        ]
        batch = pa.RecordBatch.from_arrays(columns, names)
        step = max(1, BYTES_AT_ONCE // max(1, _longest_row(batch, first)))
        for start in range(0, len(batch), step):
            for row in batch.slice(start, step).to_pylist():
                item = {name: value for name, value in row.items() if value not in (None, "")}
                yield item if table.schema is not None else _typed(item)
        first += len(batch)


def _longest_row(batch: pa.RecordBatch, first: int) -> int:
    """Return the bytes of the texts and lists of the longest row, none of which has `MAX_CELL_BYTES`."""
    sizes = np.zeros(len(batch), np.int64)
    for name in batch.schema.names:
        cells = _sizes(batch.column(name))
        if cells.max(initial=0) > MAX_CELL_BYTES:
            row = int((cells > MAX_CELL_BYTES).argmax())
            raise UploadTooLarge(
                f"The cell in row {first + row:,} of the column `{name}` has {cells[row]:,} bytes; "
                f"the limit is {MAX_CELL_BYTES:,}."
            )
        sizes += cells
    return int(sizes.max(initial=0))


def _sizes(column: Any) -> Any:
    """Return the bytes of the text or the list in each cell (n,); 0 for a number."""
    if types.is_dictionary(column.type):
        lengths = pc.take(_lengths(column.dictionary), column.indices)
    else:
        lengths = _lengths(column)
    return pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False).astype(np.int64)


def _lengths(column: Any) -> Any:
    kind = column.type
    if is_text(kind):
        return pc.binary_length(column)
    if types.is_list(kind) or types.is_large_list(kind):
        return pc.multiply(pc.list_value_length(column), 8)
    return pa.array(np.zeros(len(column), np.int64))


def _typed(item: dict[str, Any]) -> dict[str, Any]:
    """Convert the texts of a row of CSV; what is no number stays, for the service to name."""
    with suppress(ValueError, RecursionError):
        if "propensity" in item and not math.isinf(propensity := float(item["propensity"])):
            item["propensity"] = propensity
        if "logits" in item:
            item["logits"] = json.loads(item["logits"], parse_constant=_refuse)
    return item


def finite(value: Any) -> Any:
    """Give a value that JSON can hold: null for NaN, texts for infinite numbers, which the service names."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)


def _refuse(constant: str) -> float:
    raise ValueError(constant)


def _check_columns(table: OpenTable, given: Sequence[str]) -> None:
    found = set(map(clean, given))
    is_complete = "label" in found and ("id" in found or {"key", "logits"} <= found)
    if not is_complete or len(found) < len(given) or not found <= set(COLUMNS):
        raise MalformedBody(
            f"The table has the columns {table.names!r:.200}; it needs label and id (or key and logits), and "
            "may have propensity and source."
        )
    for field in () if table.schema is None else map(table.schema.field, given):
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
        is_list = types.is_list(kind) or types.is_large_list(kind)
        is_right = {
            "logits": is_list and types.is_floating(kind.value_type),
            "label": is_text(kind) or is_number,
            "propensity": is_number,
        }
        if not (is_right.get(clean(field.name), is_text(kind)) or types.is_null(kind)):
            raise MalformedBody(f"The column `{field.name}` has the type {field.type!s:.100}.")
