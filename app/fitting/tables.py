"""Reads uploaded tables in batches of rows: CSV, Arrow, and Parquet with one column per class.

A table has the column `label`, and either a list column `logits` or `probabilities`, or one column of scores
for each class. What a batch allocates is limited (`memory.room`): a compressed file announces any size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
from pyarrow import ipc

from boxcal.app.fitting.errors import InvalidUpload
from boxcal.app.fitting.labels import as_indices
from boxcal.app.fitting.memory import room
from boxcal.app.fitting.parquet import is_label
from boxcal.app.fitting.validation_set import (
    MIN_SAMPLES,
    SAMPLE_WEIGHT,
    UNKNOWN_ROWS,
    Array,
    check_size,
    keep,
    keep_groups,
    keep_labels,
    keep_weights,
    refuse_weights,
)
from boxcal.app.nearest import hint

LABEL = "label"
GROUP_COLUMNS = ("group", "groups")
SCORES = ("logits", "probabilities")
BLOCK_BYTES = 4 * 2**20
ROOM_BYTES = 256 * 2**20
"""Besides the arrays; most of it is address space that threads of the library reserve and do not use."""
BATCH_ROWS = 8192
MAX_COLUMNS = 20_000
MAX_SCHEMA_ENTRIES = 10 * MAX_COLUMNS
DELIMITERS = b",;\t"


@dataclass(frozen=True)
class Columns:
    """Which columns of a table hold the scores.

    Attributes
    ----------
    names
        One list column, or one column for each class in the order of the classes.
    kind
        `logits` or `probabilities`.
    classes
        The class names; None where a list column is read and no names are known.
    group
        The column of groups; None without one.
    weight
        The column of weights; None without one.
    """

    names: tuple[str, ...]
    kind: str
    classes: Sequence[str] | None
    group: str | None = None
    weight: str | None = None

    @property
    def read(self) -> list[str]:
        """Every column that is read."""
        return [*self.names, LABEL, *(name for name in (self.group, self.weight) if name)]

    @property
    def is_list(self) -> bool:
        """Whether one column holds a list per row."""
        return len(self.names) == 1


def read_table(
    file: IO[bytes],
    kind: str,
    folder: Path,
    *,
    classes: Sequence[str] | None,
    max_bytes: int,
    scores: str | None,
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

    Raises
    ------
    InvalidUpload, UploadTooLarge
        Names the column, the row and the value that cannot be accepted.
    """
    try:
        with room(ROOM_BYTES + 4 * max_bytes):
            columns, batches = _open(file, kind, classes, scores)
            labels: list[Array] = []
            groups: list[Array] = []
            weights: list[Array] = []
            blocks = _blocks(batches, columns, labels, groups, weights, max_bytes)
            first = next(blocks, None)
            if first is None:
                raise InvalidUpload("The table has no rows.")
            width = first.shape[1]
            if classes is not None and width != len(classes):
                raise InvalidUpload(
                    f"`{columns.names[0]}` has {width} columns; the backbone served here has {len(classes)} "
                    "classes."
                )
            keep(folder, columns.kind, (UNKNOWN_ROWS, width), first.dtype, _chain(first, blocks))
            indices = np.concatenate(labels)
            if len(indices) < MIN_SAMPLES:
                raise InvalidUpload(
                    f"The validation set has {len(indices)} samples; a fit that is judged on unseen folds "
                    f"needs at least {MIN_SAMPLES}."
                )
            keep_labels(folder, indices, width)
            if groups:
                keep_groups(folder, np.concatenate(groups), len(indices))
            if weights:
                keep_weights(folder, np.concatenate(weights), len(indices))
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


def choose_columns(names: Sequence[str], classes: Sequence[str] | None, scores: str | None) -> Columns:
    """Find the columns of the scores.

    Raises
    ------
    InvalidUpload
        Naming the column that is missing, repeated or unknown.
    """
    if len(names) > MAX_COLUMNS:
        raise InvalidUpload(f"The table has {len(names):,} columns; the limit is {MAX_COLUMNS:,}.")
    refuse_weights(names)
    for name in (LABEL, *SCORES):
        if names.count(name) > 1:
            raise InvalidUpload(f"The table has {names.count(name)} columns `{name}`.")
    if LABEL not in names:
        shown = ", ".join(f"`{name:.50}`" for name in names[:20])
        raise InvalidUpload(f"The table needs one column `{LABEL}`; it has the columns {shown}.")
    group = next((name for name in GROUP_COLUMNS if name in names and name not in (classes or ())), None)
    weight = SAMPLE_WEIGHT if SAMPLE_WEIGHT in names and SAMPLE_WEIGHT not in (classes or ()) else None
    lists = [name for name in SCORES if name in names]
    if len(lists) > 1:
        raise InvalidUpload("The table has both `logits` and `probabilities`; send the one to be fitted.")
    if lists:
        return Columns((lists[0],), lists[0], classes, group, weight)
    others = [name for name in names if name not in (LABEL, group, weight)]
    if len(set(others)) < len(others):
        repeated = next(name for name in others if others.count(name) > 1)
        raise InvalidUpload(f"The table has more than one column {repeated!r:.100}.")
    kind = scores or SCORES[0]
    if classes is None:
        if len(others) < 2:
            raise InvalidUpload("The table needs a column `logits` of lists, or one column for each class.")
        return Columns(tuple(others), kind, others, group, weight)
    indices = list(map(str, range(len(classes))))
    wanted = indices if set(others) == set(indices) and set(classes) != set(indices) else list(classes)
    for name in others:
        if name not in wanted:
            raise InvalidUpload(f"The column {name!r:.100} is no class of the model{hint(name, wanted)}.")
    if missing := [name for name in wanted if name not in others]:
        raise InvalidUpload(
            f"The table needs one column for each of the {len(classes)} classes; {missing[0]!r:.100} is "
            f"missing" + (f", and {len(missing) - 1} more." if len(missing) > 1 else ".")
        )
    return Columns(tuple(wanted), kind, classes, group, weight)


def _open(
    file: IO[bytes], kind: str, classes: Sequence[str] | None, scores: str | None
) -> tuple[Columns, Iterable[pa.RecordBatch]]:
    """Choose the columns by the schema, and open the table to read these."""
    if kind == "csv":
        return _open_csv(file, classes, scores)
    if kind == "parquet":
        source = pq.ParquetFile(file, buffer_size=2**20, thrift_container_size_limit=MAX_SCHEMA_ENTRIES)
        columns = choose_columns(source.schema_arrow.names, classes, scores)
        return columns, source.iter_batches(BATCH_ROWS, columns=columns.read, use_threads=False)
    if kind == "arrow":
        reader = ipc.open_file(file, options=ipc.IpcReadOptions(use_threads=False))
        columns = choose_columns(reader.schema.names, classes, scores)
        return columns, (reader.get_batch(number) for number in range(reader.num_record_batches))
    stream = ipc.open_stream(file, options=ipc.IpcReadOptions(use_threads=False))
    return choose_columns(stream.schema.names, classes, scores), stream


def _open_csv(
    file: IO[bytes], classes: Sequence[str] | None, scores: str | None
) -> tuple[Columns, Iterable[pa.RecordBatch]]:
    start = file.read(2**20)
    file.seek(0)
    line = start.partition(b"\n")[0]
    delimiter = max(DELIMITERS.decode(), key=lambda mark: line.count(mark.encode()))
    if (count := line.count(delimiter.encode()) + 1) > MAX_COLUMNS:
        raise InvalidUpload(f"The table has {count:,} columns; the limit is {MAX_COLUMNS:,}.")
    parsing = pacsv.ParseOptions(delimiter=delimiter)
    reading = pacsv.ReadOptions(use_threads=False, block_size=BLOCK_BYTES)
    # The names alone; types are given for each below, so that none is inferred from the first rows.
    header = pa.py_buffer(line.rstrip(b"\r") + b"\n")
    names = pacsv.read_csv(pa.BufferReader(header), reading, parsing).schema.names
    columns = choose_columns(names, classes, scores)
    kind = pa.string() if columns.is_list else pa.float64()
    types = {**dict.fromkeys(columns.read, pa.string()), **dict.fromkeys(columns.names, kind)}
    converting = pacsv.ConvertOptions(
        column_types=types, include_columns=columns.read, strings_can_be_null=False
    )
    return columns, pacsv.open_csv(file, reading, parsing, converting)


def _blocks(  # noqa: PLR0917 - three lists that it fills
    batches: Iterable[pa.RecordBatch],
    columns: Columns,
    labels: list[Array],
    groups: list[Array],
    weights: list[Array],
    max_bytes: int,
) -> Iterator[Array]:
    """Yield the scores of each batch (n, K), and append its labels, and groups and weights if any."""
    rows = width = 0
    for batch in batches:
        if not len(batch):
            continue
        batch.validate(full=True)
        block = scores_of_batch(batch, columns, rows, width)
        width = block.shape[1]
        labels.append(_labels(batch.column(LABEL), columns.classes, rows))
        if columns.group:
            groups.append(_groups(batch.column(columns.group), columns.group, rows))
        if columns.weight:
            weights.append(_weights(batch.column(columns.weight), rows))
        rows += len(batch)
        check_size({columns.kind: rows * width * block.dtype.itemsize, LABEL: 8 * rows}, max_bytes)
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
