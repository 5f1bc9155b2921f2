"""Reads a table of true labels, in the worker: Parquet or CSV becomes lines of JSON, lists of items.

What is wrong with the table is refused here; what is wrong with a row, the service says, as for JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from boxcal.app.fitting.messages import BODY_FILE, ITEMS_FILE, Tabled, TableTask
from boxcal.app.fitting.resources import limit_memory
from boxcal.app.http.problems import InvalidParameter, InvalidUpload, MalformedBody, UploadTooLarge
from boxcal.app.tables.kinds import check_tables_package

PIECE_BYTES = 64 * 1024
"""A line ends with the item that makes it so long: the service parses one line at a time."""
TO_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def read_labels(task: TableTask) -> Tabled:
    """Write the rows of a table as JSON."""
    try:
        check_tables_package()
    except InvalidUpload as error:
        raise MalformedBody(str(error)) from error
    from boxcal.app.tables.formats import open_table, readable  # noqa: PLC0415 - not before it is known to be there
    from boxcal.app.tables.label_rows import label_rows  # noqa: PLC0415 - as above

    limit_memory(task.memory_bytes)
    with (task.folder / BODY_FILE).open("rb") as file:
        kind = "parquet" if file.peek(4)[:4] == b"PAR1" else "csv"
        try:
            with readable(kind):
                return Tabled(_write(task, label_rows(open_table(file, kind))))
        except InvalidUpload as error:
            raise MalformedBody(str(error)) from error


def _write(task: TableTask, rows: Iterator[dict[str, Any]]) -> int:
    count = size = held = 0
    piece: list[bytes] = []
    with (task.folder / ITEMS_FILE).open("wb") as file:

        def end_line() -> None:
            file.write(b"[" + b",".join(piece) + b"]\n")
            piece.clear()

        for row in rows:
            count += 1
            if count > task.max_rows:
                raise InvalidParameter(f"The table has more than {task.max_rows:,} rows, which is the limit.")
            written = _written(row)
            size += len(written) + 1
            if size > task.max_bytes:
                raise UploadTooLarge(
                    f"The table has more than {task.max_bytes:,} bytes as JSON, which is the limit."
                )
            if len(written) > task.max_row_bytes:
                raise UploadTooLarge(
                    f"Row {count:,} of the table has {len(written):,} bytes as JSON; "
                    f"the limit is {task.max_row_bytes:,}."
                )
            piece.append(written)
            held += len(written)
            if held >= PIECE_BYTES:
                end_line()
                held = 0
        if piece or not count:
            end_line()
    return count


def _written(row: dict[str, Any]) -> bytes:
    """Write a row as JSON, with null for NaN and texts for infinite numbers, which the service names."""
    from boxcal.app.tables.label_rows import finite  # noqa: PLC0415 - not before pyarrow is known to be there

    try:
        text = TO_JSON.encode(row)
    except ValueError:
        text = TO_JSON.encode(finite(row))
    return text.encode()
