"""Reads tables in batches of rows: CSV, Arrow (files and streams) and Parquet, for fits, labels and bulk.

A batch is decompressed before it is counted; the memory limit of the worker process is the defence.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from pyarrow import ipc

from boxcal.app.http.problems import InvalidUpload
from boxcal.app.tables.columns import MAX_COLUMNS
from boxcal.app.tables.model_inputs import TEXT

START_BYTES = 4096
BLOCK_BYTES = 4 * 2**20
BATCH_ROWS = 8192
PAGE_BYTES = 2**20
MAX_SCHEMA_ENTRIES = 10 * MAX_COLUMNS
DELIMITERS = ",;\t"


@dataclass(frozen=True)
class OpenTable:
    """A table whose columns are known and whose rows are not read yet.

    Attributes
    ----------
    names
        Of its columns.
    schema
        Their types; None for CSV, which has none.
    rows
        How many it announces; None where it does not.
    batches
        From the columns to read, those of them that are numbers in CSV, where all others are texts, and most
        rows of a batch to batches.
    """

    names: list[str]
    schema: pa.Schema | None
    rows: int | None
    batches: Callable[[Sequence[str], Sequence[str], int], Iterator[pa.RecordBatch]]


def table_kind(start: bytes) -> str | None:
    """Name the kind of table that begins so: `parquet`, `arrow`, `arrows` (a stream) or `csv`."""
    for magic, kind in ((b"PAR1", "parquet"), (b"ARROW1", "arrow"), (b"\xff\xff\xff\xff", "arrows")):
        if start.startswith(magic):
            return kind
    line = start.partition(b"\n")[0].rstrip(b"\r")
    printable = all(byte >= 32 or byte == 9 for byte in line)
    return (
        "csv"
        if b"label" in line and printable and any(mark.encode() in line for mark in DELIMITERS)
        else None
    )


@contextmanager
def readable(kind: str) -> Generator[None]:
    """Convert errors of a damaged table to `InvalidUpload`; those of the disk and of this process stay."""
    try:
        yield
    except pa.ArrowMemoryError as error:
        raise InvalidUpload(f"The file announces more memory than it may take: {error}"[:500]) from error
    except (MemoryError, InvalidUpload):
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InvalidUpload(f"The file is no readable .{kind}: {error}"[:500]) from error


def open_table(file: IO[bytes] | Path, kind: str) -> OpenTable:
    """Open a table; `readable` must be around it and around the batches."""
    if kind == "csv" and not isinstance(file, Path):
        return _open_csv(file)
    if kind == "parquet":
        source = pq.ParquetFile(file, buffer_size=PAGE_BYTES, thrift_container_size_limit=MAX_SCHEMA_ENTRIES)
        schema, announced = source.schema_arrow, source.metadata
        held = sum(announced.row_group(number).num_rows for number in range(announced.num_row_groups))
        if held != announced.num_rows:
            raise InvalidUpload(f"The footer announces {announced.num_rows:,} rows, but there are {held:,}.")

        def batches(read: Sequence[str], _: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
            return _valid(source.iter_batches(rows, columns=list(read), use_threads=False))

        return OpenTable(list(schema.names), schema, announced.num_rows, batches)
    options = ipc.IpcReadOptions(use_threads=False)
    if kind == "arrow":
        reader = ipc.open_file(file, options=options)
        found = (reader.get_batch(number) for number in range(reader.num_record_batches))
        return OpenTable(list(reader.schema.names), reader.schema, None, lambda *_: _valid(found))
    stream = ipc.open_stream(file, options=options)
    return OpenTable(list(stream.schema.names), stream.schema, None, lambda *_: _valid(stream))


def _valid(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if len(batch):
            batch.validate(full=True)
            yield batch


def _open_csv(file: IO[bytes]) -> OpenTable:
    start = file.read(2**20)
    file.seek(0)
    line = start.partition(b"\n")[0].rstrip(b"\r")
    delimiter = max(DELIMITERS, key=lambda mark: line.count(mark.encode()))
    if (count := line.count(delimiter.encode()) + 1) > MAX_COLUMNS:
        raise InvalidUpload(f"The table has {count:,} columns; the limit is {MAX_COLUMNS:,}.")
    reading = pacsv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
    header = pa.BufferReader(pa.py_buffer(line + b"\n"))
    names = pacsv.read_csv(header, reading, pacsv.ParseOptions(delimiter=delimiter)).schema.names

    def batches(read: Sequence[str], numbers: Sequence[str], _: int) -> Iterator[pa.RecordBatch]:
        # Types are given for each column, so that none is inferred from the first rows.
        kinds = dict.fromkeys(read, pa.string()) | dict.fromkeys(numbers, pa.float64())
        converting = pacsv.ConvertOptions(
            column_types=kinds, include_columns=list(read), strings_can_be_null=False
        )
        parsing = pacsv.ParseOptions(delimiter=delimiter, newlines_in_values=TEXT in read)
        return _valid(pacsv.open_csv(file, reading, parsing, converting))

    return OpenTable(list(names), None, None, batches)
