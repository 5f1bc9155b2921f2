"""Opens the CSV and Parquet files that commands read row by row."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from boxcal.app.cli.failures import UsageError


@contextmanager
def csv_rows(path: Path) -> Iterator[csv.DictReader[str]]:
    """Open a CSV file in UTF-8 whose first line names the columns.

    Raises
    ------
    UsageError
        It cannot be read; also from the block that reads it.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as text:
            yield csv.DictReader(text)
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read as CSV: {error}") from error


@contextmanager
def parquet_file(path: Path) -> Iterator[Any]:
    """Open a `pyarrow.parquet.ParquetFile`.

    Raises
    ------
    UsageError
        It cannot be read; also from the block that reads it.
    """
    from pyarrow import parquet  # noqa: PLC0415 - only where the file is Parquet

    try:
        with parquet.ParquetFile(path) as opened:
            yield opened
    except ValueError as error:  # pyarrow's errors about files are ValueErrors
        raise UsageError(f"{path} cannot be read as Parquet: {error}") from error


def json_numbers(path: Path, row: int, cell: str | None) -> Any:
    """Read a cell that holds a JSON array of numbers.

    Raises
    ------
    UsageError
        It is no JSON.
    """
    try:
        return json.loads(cell or "")
    except ValueError:
        raise UsageError(f"{path}, row {row}: {cell!r} is no JSON array of numbers") from None
