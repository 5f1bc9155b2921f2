"""Reads tables in batches of rows: CSV, Arrow (files and streams) and Parquet, for fits, labels and bulk.

A batch is decompressed before it is counted; the memory limit of the worker process is the defence.
"""

from __future__ import annotations

import io
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import IO, Any
from zipfile import BadZipFile

import orjson
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from pyarrow import ipc, types

from boxcal.app.http.problems import BoxcalError, InvalidUpload, MalformedBody, UploadTooLarge
from boxcal.app.settings import limits
from boxcal.app.tables.columns import MAX_COLUMNS
from boxcal.app.tables.file_part import FilePart
from boxcal.app.tables.kinds import BOM, dialect

START_ROWS_BYTES = 2**20
BLOCK_BYTES = 4 * 2**20
BATCH_ROWS = 8192
PAGE_BYTES = 2**20
MAX_SCHEMA_ENTRIES = 10 * MAX_COLUMNS
DAMAGED_ZIP = (BadZipFile, zlib.error, EOFError)
NUMBER = re.compile(
    r"\s*(-?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?(nan|inf|infinity))?\s*", re.ASCII | re.IGNORECASE
)
"""What Arrow reads as a number, or as a gap."""
DECIMAL = b"boxcal.decimal"
"""Where the batches of a CSV say, in their schema, how the numbers among its texts are written."""

PAIR = {"label", "score"}
"""Members by which pipelines of text classification give the score of one class."""

Batches = Callable[[Sequence[str], Sequence[str], int], Iterator[pa.RecordBatch]]


@dataclass(frozen=True)
class OpenTable:
    """A table whose columns are known and whose rows are not read yet."""

    names: list[str]
    schema: pa.Schema | None  # Their types; None for CSV, which has none
    rows: int | None  # How many it announces; None where it does not
    # From the columns to read, those of them that are numbers in CSV, where all others are texts, and most
    # rows of a batch to batches; each call begins at the first row
    batches: Batches
    # Gives the columns that hold no numbers, of CSV as its first rows show, and of each a cell or the type
    texts: Callable[[], dict[str, str]]


@contextmanager
def readable(kind: str) -> Generator[None]:
    """Convert errors of a damaged table to `InvalidUpload`; those of the disk and of this process stay."""
    try:
        yield
    except pa.ArrowMemoryError as error:
        raise InvalidUpload(f"The file announces more memory than it may take: {error}"[:500]) from error
    except (MemoryError, BoxcalError):
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError, ValueError, OverflowError, *DAMAGED_ZIP) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        said = re.search(r"Expected (\d+) columns, got (\d+)", str(error))
        more = " Does each row end with a delimiter?" if said and int(said[2]) == int(said[1]) + 1 else ""
        if isinstance(error, UnicodeDecodeError) or "invalid UTF8 data" in str(error):
            more = ". Save it in UTF-8."
        if isinstance(error, OverflowError):
            more = ". Integers have up to 64 bits: write labels and groups that are larger as texts."
        raise InvalidUpload(f"The file is no readable .{kind}: {error}"[:500] + more) from error


def open_table(file: IO[bytes] | Path, kind: str) -> OpenTable:
    """Open a table; `readable` must be around it and around the batches."""
    if kind in ("csv", "json") and not isinstance(file, Path):
        return _open_csv(file) if kind == "csv" else _open_records(file)
    if kind == "parquet":
        source = pq.ParquetFile(file, buffer_size=PAGE_BYTES, thrift_container_size_limit=MAX_SCHEMA_ENTRIES)
        schema, announced = source.schema_arrow, source.metadata
        held = sum(announced.row_group(number).num_rows for number in range(announced.num_row_groups))
        if held != announced.num_rows:
            raise InvalidUpload(f"The footer announces {announced.num_rows:,} rows, but there are {held:,}.")

        def batches(read: Sequence[str], _: Sequence[str], rows: int) -> Iterator[pa.RecordBatch]:
            return _valid(source.iter_batches(rows, columns=list(read), use_threads=False))

        return _typed(schema, announced.num_rows, batches)
    options = ipc.IpcReadOptions(use_threads=False)
    if kind == "arrow":
        reader = ipc.open_file(file, options=options)
        numbers = range(reader.num_record_batches)
        return _typed(reader.schema, None, lambda *_: _valid(reader.get_batch(number) for number in numbers))
    stream = ipc.open_stream(file, options=options)

    def again(*_: Any) -> Iterator[pa.RecordBatch]:
        if not isinstance(file, Path):
            file.seek(0)
        return _valid(ipc.open_stream(file, options=options))

    return _typed(stream.schema, None, again)


def _typed(schema: pa.Schema, rows: int | None, batches: Batches) -> OpenTable:
    def texts() -> dict[str, str]:
        return {
            field.name: "no value" if types.is_null(field.type) else f"the type {field.type}"
            for field in schema
            if not _is_number(field.type)
        }

    schema = pa.schema([field.with_type(_without_views(field.type)) for field in schema])
    return OpenTable(list(schema.names), schema, rows, batches, texts)


def _is_number(kind: pa.DataType) -> bool:
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _valid(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if len(batch):
            batch.validate(full=True)
            columns = [_plain(column) for column in batch.columns]
            yield pa.RecordBatch.from_arrays(columns, batch.schema.names, metadata=batch.schema.metadata)


def _without_views(kind: pa.DataType) -> pa.DataType:
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _without_views(kind.value_type), kind.ordered)
    return pa.large_string() if types.is_string_view(kind) else kind


def _plain(column: pa.Array) -> pa.Array:
    """Give views of texts, which Polars writes, as texts: Arrow itself has few functions for views."""
    kind = _without_views(column.type)
    if kind == column.type:
        return column
    if not types.is_dictionary(kind):
        return column.cast(kind)
    return pa.DictionaryArray.from_arrays(column.indices, column.dictionary.cast(kind.value_type))


def _open_records(file: IO[bytes]) -> OpenTable:
    most = limits.MAX_JSON_UPLOAD_BYTES
    content = file.read(most + 1)
    if len(content) > most:
        raise UploadTooLarge(f"The JSON document is larger than {most:,} bytes. Send .parquet.")
    content = content.removeprefix(BOM)
    if re.match(rb"\s*\[", content):
        parts = {"The document": content}
    else:
        lines = enumerate(content.splitlines(), 1)
        parts = {f"Line {number} of the document": line for number, line in lines if line.strip()}
    rows: list[Any] = []
    for what, part in parts.items():
        try:
            found = orjson.loads(part)
        except orjson.JSONDecodeError as error:
            raise MalformedBody(f"{what} is not JSON: {error}.") from error
        rows += found if isinstance(found, list) else [found]
    rows = [_flat(row) if isinstance(row, dict) else row for row in rows]
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or row.keys() != rows[0].keys():
            raise InvalidUpload(f"Record {number} of the document does not have the members of the first.")
    return in_memory(pa.Table.from_pylist(rows))


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """Make each member of a member a column, `scores.cat`.

    Lists of `{"label": "cat", "score": 0.9}` become such members; they are sorted by score, so by name here.
    """
    members: list[tuple[str, Any]] = []
    for name, value in record.items():
        inner: Any
        inner, pairs = value, value if isinstance(value, list) else []
        if pairs and all(isinstance(one, dict) and one.keys() == PAIR for one in pairs):
            inner = sorted(((str(one["label"]), one["score"]) for one in pairs), key=itemgetter(0))
        elif isinstance(value, dict):
            inner = value.items()
        members += [(name, value)] if inner is value else [(f"{name}.{key}", one) for key, one in inner]
    found = dict(members)
    if len(found) < len(members):
        name = Counter(name for name, _ in members).most_common(1)[0][0]
        raise InvalidUpload(f"A record of the document has more than one value of {name!r:.100}.")
    return found


def in_memory(table: pa.Table) -> OpenTable:
    """Give a table that is in memory already as one that is read in batches."""

    def batches(read: Sequence[str], _: Sequence[str], size: int) -> Iterator[pa.RecordBatch]:
        return _valid(iter(table.select(list(read)).to_batches(size)))

    return _typed(table.schema, len(table), batches)


def _open_csv(file: IO[bytes]) -> OpenTable:
    start = file.read(START_ROWS_BYTES)
    file.seek(0)
    line = start.partition(b"\n")[0].rstrip(b"\r")
    delimiter, decimal = dialect(start)
    if (count := line.count(delimiter.encode()) + 1) > MAX_COLUMNS:
        raise InvalidUpload(f"The table has {count:,} columns; the limit is {MAX_COLUMNS:,}.")
    reading = pacsv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
    # Also where no column of texts is read: without it, blocks end at line breaks within cells.
    parsing = pacsv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    header = pa.BufferReader(pa.py_buffer(line + b"\n"))
    names = pacsv.read_csv(header, reading, parsing).schema.names

    def batches(read: Sequence[str], numbers: Sequence[str], _: int) -> Iterator[pa.RecordBatch]:
        # Types are given for each column, so that none is inferred from the first rows.
        kinds = dict.fromkeys(read, pa.string()) | dict.fromkeys(numbers, pa.float64())
        converting = pacsv.ConvertOptions(
            column_types=kinds,
            include_columns=list(read),
            strings_can_be_null=False,
            decimal_point=decimal,
        )
        if len(start) < START_ROWS_BYTES:  # the whole table, read already
            table = pacsv.read_csv(pa.py_buffer(start), reading, parsing, converting)
            found = _valid(iter(table.to_batches()))
        else:
            file.seek(0)
            found = _valid(pacsv.open_csv(_native(file), reading, parsing, converting))
        return (batch.replace_schema_metadata({DECIMAL: decimal}) for batch in found)

    def texts() -> dict[str, str]:
        whole = start if len(start) < START_ROWS_BYTES else _whole_rows(start)
        if not whole:  # the first line alone is longer
            return {}
        inferring = pacsv.ConvertOptions(decimal_point=decimal)
        first = pacsv.read_csv(pa.py_buffer(whole), reading, parsing, inferring)
        columns = zip(first.column_names, first.columns, strict=True)
        found = {name: column for name, column in columns if len(column) and not _is_number(column.type)}
        return {name: _held(column, decimal) for name, column in found.items()}

    return OpenTable(list(names), None, None, batches, texts)


def _native(file: IO[bytes]) -> Any:
    """Let Arrow open a file itself: its thread that reads ahead from Python aborts it where it ends."""
    raw = file.raw if isinstance(file, io.BufferedReader) else file
    if isinstance(raw, FilePart):
        return pa.OSFile(os.fsencode(raw.path)).get_stream(raw.start, raw.length)
    return pa.OSFile(os.fsencode(raw.name)) if isinstance(raw, io.FileIO) else file


def _whole_rows(start: bytes) -> bytes:
    """Return the rows that end in the first bytes of a table, at a line break outside of quotes."""
    end = start.rfind(b"\n")
    is_quoted = start.count(b'"', 0, max(end, 0)) % 2
    while is_quoted and end > 0:
        earlier = max(start.rfind(b"\n", 0, end), 0)
        is_quoted ^= start.count(b'"', earlier, end) % 2
        end = earlier
    return start[: end + 1] if end > 0 else b""


def _held(column: pa.ChunkedArray, decimal: str) -> str:
    """Show the first cell that is no number."""
    if types.is_null(column.type):
        return "no value"
    for cell in column.cast(pa.string()).to_pylist():
        if not NUMBER.fullmatch((cell or "").replace(decimal, ".")):
            return f"{cell!r:.50}"
    return f"{str(column[0])!r:.50}"
