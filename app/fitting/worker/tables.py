"""Reads uploaded tables in batches of rows: CSV, Arrow, and Parquet with one column per class.

A table has the column `label`, and either a list column `logits` or `probabilities`, or one column of scores
for each class, or what the model reads: features or a text. What a batch allocates is limited
(`memory.room`): a compressed file announces any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from pyarrow import ipc

from boxcal.app.fitting.model_inputs import TEXTS, ModelInputs, naming_samples
from boxcal.app.fitting.worker.labels import as_indices
from boxcal.app.fitting.worker.memory import room
from boxcal.app.fitting.worker.parquet import is_label
from boxcal.app.fitting.worker.samples import features_of, keep_samples, texts_of
from boxcal.app.fitting.worker.table_columns import LABEL, MAX_COLUMNS, Columns, choose_columns
from boxcal.app.fitting.worker.validation_set import (
    SAMPLE_WEIGHT,
    UNKNOWN_ROWS,
    Array,
    check_count,
    check_size,
    keep,
    keep_groups,
    keep_labels,
    keep_weights,
)
from boxcal.app.http.problems import InvalidUpload

BLOCK_BYTES = 4 * 2**20
ROOM_BYTES = 256 * 2**20
"""Besides the arrays; most of it is address space that threads of the library reserve and do not use."""
BATCH_ROWS = 8192
MAX_SCHEMA_ENTRIES = 10 * MAX_COLUMNS
DELIMITERS = b",;\t"


def read_table(
    file: IO[bytes],
    kind: str,
    folder: Path,
    *,
    classes: Sequence[str] | None,
    max_bytes: int,
    scores: str | None,
    inputs: ModelInputs | None = None,
) -> None:
    """Check a table and keep it in `folder`.

    Parameters
    ----------
    kind
        `csv`, `arrow` (a file), `arrows` (a stream) or `parquet`.
    classes
        The backbone's K labels; None to take them from the columns.
    max_bytes
        How large the arrays may be.
    scores
        What columns named by class hold, `logits` unless given.
    inputs
        Of a model of features or texts.

    Raises
    ------
    InvalidUpload, UploadTooLarge
        Names the column, the row and the value that cannot be accepted.
    """
    try:
        with room(ROOM_BYTES + 4 * max_bytes):
            columns, batches = _open(file, kind, classes, scores, inputs)
            beside = _Beside(columns)
            if columns.has_samples and inputs is not None:
                blocks = _samples(batches, columns, inputs, beside)
                keep_samples(folder, inputs, blocks, max_bytes)
                width = len(inputs.labels)
            else:
                width = _keep_scores(folder, batches, columns, beside, max_bytes)
            beside.keep(folder, width)
    except pa.ArrowMemoryError as error:
        raise InvalidUpload(f"The file announces more memory than it may take: {error}"[:500]) from error
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of the file
        if isinstance(error, InvalidUpload):
            raise
        raise InvalidUpload(f"The file is no readable .{kind}: {error}"[:500]) from error


def _open(
    file: IO[bytes],
    kind: str,
    classes: Sequence[str] | None,
    scores: str | None,
    inputs: ModelInputs | None,
) -> tuple[Columns, Iterable[pa.RecordBatch]]:
    """Choose the columns by the schema, and open the table to read these."""

    def choose(names: Sequence[str]) -> Columns:
        return choose_columns(names, classes, scores, inputs)

    if kind == "csv":
        return _open_csv(file, choose)
    if kind == "parquet":
        source = pq.ParquetFile(file, buffer_size=2**20, thrift_container_size_limit=MAX_SCHEMA_ENTRIES)
        columns = choose(source.schema_arrow.names)
        return columns, source.iter_batches(BATCH_ROWS, columns=columns.read, use_threads=False)
    if kind == "arrow":
        reader = ipc.open_file(file, options=ipc.IpcReadOptions(use_threads=False))
        columns = choose(reader.schema.names)
        return columns, (reader.get_batch(number) for number in range(reader.num_record_batches))
    stream = ipc.open_stream(file, options=ipc.IpcReadOptions(use_threads=False))
    return choose(stream.schema.names), stream


def _open_csv(
    file: IO[bytes], choose: Callable[[Sequence[str]], Columns]
) -> tuple[Columns, Iterable[pa.RecordBatch]]:
    start = file.read(2**20)
    file.seek(0)
    line = start.partition(b"\n")[0]
    delimiter = max(DELIMITERS.decode(), key=lambda mark: line.count(mark.encode()))
    if (count := line.count(delimiter.encode()) + 1) > MAX_COLUMNS:
        raise InvalidUpload(f"The table has {count:,} columns; the limit is {MAX_COLUMNS:,}.")
    reading = pacsv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
    # The names alone; types are given for each below, so that none is inferred from the first rows.
    header = pa.py_buffer(line.rstrip(b"\r") + b"\n")
    parsing = pacsv.ParseOptions(delimiter=delimiter)
    columns = choose(pacsv.read_csv(pa.BufferReader(header), reading, parsing).schema.names)
    parsing.newlines_in_values = columns.kind == TEXTS
    is_text = columns.is_list or columns.has_samples
    types = dict.fromkeys(columns.read, pa.string())
    if not is_text:
        types |= dict.fromkeys(columns.names, pa.float64())
    converting = pacsv.ConvertOptions(
        column_types=types, include_columns=columns.read, strings_can_be_null=False
    )
    return columns, pacsv.open_csv(file, reading, parsing, converting)


class _Beside:
    """The labels of a table, and its groups and weights if it has any, collected by batches."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._found: dict[str, list[Array]] = {LABEL: [], "groups": [], SAMPLE_WEIGHT: []}
        self.rows = 0

    def take(self, batch: pa.RecordBatch) -> None:
        """Read them from the next rows."""
        columns, found = self._columns, self._found
        found[LABEL].append(_labels(batch.column(LABEL), columns.classes, self.rows))
        if columns.group:
            found["groups"].append(_groups(batch.column(columns.group), columns.group, self.rows))
        if columns.weight:
            found[SAMPLE_WEIGHT].append(_weights(batch.column(columns.weight), self.rows))
        self.rows += len(batch)

    def keep(self, folder: Path, num_classes: int) -> None:
        """Check them all, and write them into `folder`."""
        labels, groups, weights = (np.concatenate(one) if one else None for one in self._found.values())
        if labels is not None:
            keep_labels(folder, labels, num_classes)
        if groups is not None:
            keep_groups(folder, groups, self.rows)
        if weights is not None:
            keep_weights(folder, weights, self.rows)


def _keep_scores(
    folder: Path, batches: Iterable[pa.RecordBatch], columns: Columns, beside: _Beside, max_bytes: int
) -> int:
    """Write the logits, and return how many classes there are."""
    blocks = _scores(batches, columns, beside, max_bytes)
    first = next(blocks, None)
    if first is None:
        raise InvalidUpload("The table has no rows.")
    width: int = first.shape[1]
    if columns.classes is not None and width != len(columns.classes):
        raise InvalidUpload(
            f"`{columns.names[0]}` has {width} columns; the backbone served here has {len(columns.classes)} "
            "classes."
        )
    keep(folder, columns.kind, (UNKNOWN_ROWS, width), first.dtype, _chain(first, blocks))
    check_count(beside.rows)
    return width


def _scores(
    batches: Iterable[pa.RecordBatch], columns: Columns, beside: _Beside, max_bytes: int
) -> Iterator[Array]:
    """Yield the scores of each batch (n, K)."""
    width = 0
    for batch in batches:
        if not len(batch):
            continue
        batch.validate(full=True)
        block = scores_of_batch(batch, columns, beside.rows, width)
        width = block.shape[1]
        beside.take(batch)
        size = beside.rows * width * block.dtype.itemsize
        check_size({columns.kind: size, LABEL: 8 * beside.rows}, max_bytes)
        yield block


def _samples(
    batches: Iterable[pa.RecordBatch], columns: Columns, inputs: ModelInputs, beside: _Beside
) -> Iterator[Array]:
    """Yield the rows of features (n, D) or the texts (n,) of each batch."""
    inputs.check_tokenizer()
    rows = inputs.rows
    for batch in batches:
        if not len(batch):
            continue
        batch.validate(full=True)
        first = beside.rows
        with naming_samples():
            block = (
                texts_of(batch, columns.names[0], first)
                if columns.kind == TEXTS
                else features_of(batch, rows, first)
            )
        beside.take(batch)
        yield block


def _groups(column: Any, name: str, first: int) -> Array:
    if column.null_count:
        raise InvalidUpload(f"{name}[{first + _first_null(column)}] is missing.")
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not (_is_text(column.type) or pa.types.is_integer(column.type)):
        raise InvalidUpload(f"The column `{name}` must hold integers or texts, got {column.type}.")
    values = np.asarray(column.to_numpy(zero_copy_only=False))
    return values.astype(np.int64 if values.dtype.kind in "iu" else str)


def _weights(column: Any, first: int) -> Array:
    if column.null_count:
        raise InvalidUpload(f"{SAMPLE_WEIGHT}[{first + _first_null(column)}] is missing.")
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        if not _is_text(column.type):
            raise InvalidUpload(f"The column `{SAMPLE_WEIGHT}` must hold numbers, got {column.type}.")
        column = column.cast(pa.float64())  # of a CSV
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.float64)


def _labels(column: Any, classes: Sequence[str] | None, first: int) -> Array:
    if column.null_count:
        raise InvalidUpload(f"label[{first + _first_null(column)}] is missing.")
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if not is_label(column.type):
        raise InvalidUpload(f"The column `{LABEL}` must hold class indices or names, got {column.type}.")
    return as_indices(np.asarray(column.to_numpy(zero_copy_only=False)), classes, first)


def _is_text(kind: Any) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def scores_of_batch(batch: pa.RecordBatch, columns: Columns, first: int, width: int = 0) -> Array:
    """Return the scores (n, K) of a batch of rows, the first of which has the number `first`.

    Raises
    ------
    InvalidUpload
        Naming the column and the row that cannot be accepted; a row that has not `width` numbers, if given.
    """
    if columns.is_list:
        return _lists(batch.column(columns.names[0]), columns.names[0], first, width)
    parts = []
    for name in columns.names:
        column = batch.column(name)
        if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
            raise InvalidUpload(f"The column {name!r:.100} must hold numbers, got {column.type}.")
        if column.null_count:
            raise InvalidUpload(f"{name}[{first + _first_null(column)}] is missing.")
        parts.append(column.to_numpy(zero_copy_only=False))
    return np.stack(parts, axis=1)


def _lists(column: Any, name: str, first: int, width: int) -> Array:
    """Bring a column of lists to (n, K), or name the first row of another length than `width`."""
    if column.null_count:
        raise InvalidUpload(f"{name}[{first + _first_null(column)}] is missing.")
    kind = column.type
    if _is_text(kind):
        return _written_lists(column, name, first, width)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_floating(kind.value_type):
        raise InvalidUpload(f"The column `{name}` must hold lists of floats, got {kind}.")
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    _check_lengths(lengths, name, first, width or int(lengths[0]))
    values = column.flatten()
    if values.null_count:
        row, place = divmod(_first_null(values), int(lengths[0]))
        raise InvalidUpload(f"{name}[{first + row}, {place}] is missing.")
    array: Array = values.to_numpy(zero_copy_only=False)
    return array.reshape(len(column), -1)


def _written_lists(column: Any, name: str, first: int, width: int) -> Array:
    """Read lists that a text file writes as `[1.5, -2.0]`."""
    rows = []
    for position, text in enumerate(column.to_pylist()):
        try:
            row = np.array(orjson.loads(text), np.float64)
        except (orjson.JSONDecodeError, TypeError, ValueError):
            raise InvalidUpload(f"{name}[{first + position}] is {text!r:.100}, no list of numbers.") from None
        if row.ndim != 1:
            raise InvalidUpload(f"{name}[{first + position}] is {text!r:.100}, no list of numbers.")
        rows.append(row)
    _check_lengths(np.array([len(row) for row in rows]), name, first, width or len(rows[0]))
    return np.stack(rows)


def _check_lengths(lengths: Array, name: str, first: int, width: int) -> None:
    wrong = np.flatnonzero(lengths != width)
    if wrong.size or width < 2:
        row = int(wrong[0]) if wrong.size else 0
        raise InvalidUpload(
            f"{name}[{first + row}] is a list of {lengths[row]}; it must have {max(2, width)} numbers, one "
            "for each class."
        )


def _chain(first: Array, rest: Iterator[Array]) -> Iterator[Array]:
    yield first
    yield from rest


def _first_null(column: Any) -> int:
    return int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
