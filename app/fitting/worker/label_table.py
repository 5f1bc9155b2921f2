"""Reads a table of true labels, in the worker: Parquet or CSV becomes the JSON body of `POST /feedback`.

What is wrong with the table is refused here; what is wrong with a row, the service says, as for JSON.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import IO, Any

import orjson

from boxcal.app.fitting.messages import BODY_FILE, ITEMS_FILE, Tabled, TableTask
from boxcal.app.fitting.worker.memory import limit_memory
from boxcal.app.http.problems import InvalidParameter, MalformedBody, UploadTooLarge

COLUMNS = ("id", "label", "propensity", "source", "key", "logits")
ROWS_AT_ONCE = 1000
PAGE_BYTES = 2**20
MAX_SCHEMA_ENTRIES = 1000
PARQUET_MAGIC = b"PAR1"

Row = dict[str, Any] | list[str]


def read_labels(task: TableTask) -> Tabled:
    """Write the rows of a table as JSON.

    Raises
    ------
    MalformedBody, InvalidParameter, UploadTooLarge
        It cannot be read, has other columns or too many rows, or is too large as JSON.
    """
    limit_memory(task.memory_bytes)
    csv.field_size_limit(task.max_bytes)
    with (task.folder / BODY_FILE).open("rb") as file:
        is_parquet = file.peek(len(PARQUET_MAGIC))[: len(PARQUET_MAGIC)] == PARQUET_MAGIC
        rows = _parquet_rows(file) if is_parquet else _csv_rows(file, set(task.labels))
        with closing(rows):
            return Tabled(_write(task.folder / ITEMS_FILE, rows, task.max_rows, task.max_bytes))


def _write(path: Path, rows: Iterator[Row], max_rows: int, max_bytes: int) -> int:
    count = size = 0
    with path.open("wb") as file:
        file.write(b'{"items":[')
        for row in rows:
            count += 1
            if count > max_rows:
                raise InvalidParameter(f"The table has more than {max_rows:,} rows, which is the limit.")
            item = (
                {name: value for name, value in row.items() if value is not None}
                if isinstance(row, dict)
                else row
            )
            written = orjson.dumps(item)
            size += len(written) + 1
            if size > max_bytes:
                raise UploadTooLarge(
                    f"The table has more than {max_bytes:,} bytes as JSON, which is the limit."
                )
            file.write(written if count == 1 else b"," + written)
        file.write(b"]}")
    return count


def _csv_rows(file: IO[bytes], names: set[str]) -> Generator[Row, None, None]:
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    try:
        rows = csv.reader(text, strict=True)
        header = next(rows, [])
        _check_columns(header)
        for row in rows:
            if row:
                yield _item(header, row, names)
    except (UnicodeDecodeError, csv.Error) as error:
        raise MalformedBody(f"The body is not CSV: {error}.") from error
    finally:
        text.detach()  # the file belongs to the caller


def _item(header: Sequence[str], row: Sequence[str], names: set[str]) -> Row:
    """Return the item of a line; numbers are written as text there."""
    if len(row) != len(header):
        return list(row)
    item: dict[str, Any] = {name: value for name, value in zip(header, row, strict=True) if value}
    label = item.get("label", "")
    if label not in names and label.isdecimal():
        item["label"] = int(label)
    with suppress(ValueError):
        if "propensity" in item:
            item["propensity"] = float(item["propensity"])
        if "logits" in item:
            item["logits"] = orjson.loads(item["logits"])
    return item


def _parquet_rows(file: IO[bytes]) -> Generator[Row, None, None]:
    import pyarrow as pa  # noqa: PLC0415 - takes long to load
    from pyarrow import parquet  # noqa: PLC0415

    try:
        source = parquet.ParquetFile(
            file, buffer_size=PAGE_BYTES, thrift_container_size_limit=MAX_SCHEMA_ENTRIES
        )
        _check_columns(source.schema_arrow.names)
        _check_types(source.schema_arrow)
        for batch in source.iter_batches(ROWS_AT_ONCE, use_threads=False):
            batch.validate(full=True)
            yield from batch.to_pylist()
    except pa.ArrowMemoryError as error:
        raise MalformedBody(f"The file announces more memory than it may take: {error}"[:500]) from error
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of the file
        raise MalformedBody(f"The body is no readable Parquet: {error}"[:500]) from error


def _check_columns(names: Sequence[str]) -> None:
    found = set(names)
    is_complete = "label" in found and ("id" in found or {"key", "logits"} <= found)
    if not is_complete or len(found) < len(names) or not found <= set(COLUMNS):
        raise MalformedBody(
            f"The table has the columns {list(names)!r:.200}; it needs label and id (or key and logits), and "
            "may have propensity and source."
        )


def _check_types(schema: Any) -> None:
    from pyarrow import types  # noqa: PLC0415

    for field in schema:
        kind = field.type.value_type if types.is_dictionary(field.type) else field.type
        is_text = types.is_string(kind) or types.is_large_string(kind)
        is_number = types.is_integer(kind) or types.is_floating(kind)
        if field.name == "logits":
            is_right = (types.is_list(kind) or types.is_large_list(kind)) and types.is_floating(
                kind.value_type
            )
        elif field.name == "label":
            is_right = is_text or types.is_integer(kind)
        else:
            is_right = is_number if field.name == "propensity" else is_text
        if not is_right:
            raise MalformedBody(f"The column `{field.name}` has the type {field.type!s:.100}.")
