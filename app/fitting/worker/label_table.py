"""Reads a table of true labels, in the worker: Parquet or CSV becomes the JSON body of `POST /feedback`.

What is wrong with the table is refused here; what is wrong with a row, the service says, as for JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from boxcal.app.fitting.messages import BODY_FILE, ITEMS_FILE, Tabled, TableTask
from boxcal.app.fitting.resources import limit_memory
from boxcal.app.http.problems import InvalidParameter, InvalidUpload, MalformedBody, UploadTooLarge
from boxcal.app.tables.formats import open_table, readable
from boxcal.app.tables.label_rows import label_rows


def read_labels(task: TableTask) -> Tabled:
    """Write the rows of a table as JSON."""
    limit_memory(task.memory_bytes)
    with (task.folder / BODY_FILE).open("rb") as file:
        kind = "parquet" if file.peek(4)[:4] == b"PAR1" else "csv"
        try:
            with readable(kind):
                return Tabled(_write(task, label_rows(open_table(file, kind))))
        except InvalidUpload as error:
            raise MalformedBody(str(error)) from error


def _write(task: TableTask, rows: Iterator[dict[str, Any]]) -> int:
    count = size = 0
    with (task.folder / ITEMS_FILE).open("wb") as file:
        file.write(b'{"items":[')
        for row in rows:
            count += 1
            if count > task.max_rows:
                raise InvalidParameter(f"The table has more than {task.max_rows:,} rows, which is the limit.")
            written = orjson.dumps(row)
            size += len(written) + 1
            if size > task.max_bytes:
                raise UploadTooLarge(
                    f"The table has more than {task.max_bytes:,} bytes as JSON, which is the limit."
                )
            file.write(written if count == 1 else b"," + written)
        file.write(b"]}")
    return count
