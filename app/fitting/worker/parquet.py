"""Reads an uploaded `.parquet`, columns `logits` (a list per row) and `label`, in batches of rows.

The sizes that the file declares are checked first, and what comes out of it is counted: neither is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from boxcal.app.fitting.worker.labels import as_indices
from boxcal.app.fitting.worker.validation_set import (
    SAMPLE_WEIGHT,
    Array,
    check_shapes,
    check_size,
    keep,
    keep_labels,
    refuse_weights,
    stored_dtype,
)
from boxcal.app.http.problems import InvalidUpload

BATCH_BYTES = 8 * 2**20
PAGE_BYTES = 2**20
MAX_SCHEMA_ENTRIES = 10_000


def read_parquet(file: IO[bytes], folder: Path, *, classes: Sequence[str] | None, max_bytes: int) -> None:
    """Check the two columns and keep them in `folder`.

    Parameters
    ----------
    classes
        The K class names of the backbone; None to accept any K.
    max_bytes
        How large the arrays may be.

    Raises
    ------
    InvalidUpload, UploadTooLarge
        Names the column, the place and the value that cannot be accepted.
    """
    num_classes = None if classes is None else len(classes)
    try:
        source = pq.ParquetFile(file, buffer_size=PAGE_BYTES, thrift_container_size_limit=MAX_SCHEMA_ENTRIES)
        dtype = _check_schema(source.schema_arrow)
        rows, values = source.metadata.num_rows, _declared_values(source.metadata)
        columns = num_classes if num_classes is not None else values // max(1, rows)
        check_shapes("logits", (rows, columns), (rows,), num_classes)
        if values > rows * columns:
            raise InvalidUpload(
                f"The column `logits` holds {values:,} numbers in {rows:,} rows; it must hold {columns} in "
                "each row, one for each class."
            )
        size = rows * columns * stored_dtype(dtype).itemsize
        check_size({"logits": size, "label": 8 * rows}, max_bytes)
        keep_labels(folder, _labels(source, rows, classes), columns)
        keep(folder, "logits", (rows, columns), dtype, _logits(source, rows, columns, dtype))
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the disk, not of the file
        raise InvalidUpload(f"The file is no readable .parquet: {error}"[:500]) from error


def _check_schema(schema: pa.Schema) -> np.dtype[Any]:
    """Refuse other columns and types than are read, and say of which dtype the logits are."""
    refuse_weights(schema.names)
    for name in ("logits", "label"):
        if schema.names.count(name) != 1:
            raise InvalidUpload(
                f"The .parquet needs one column `{name}`; it has the columns "
                f"{', '.join(f'`{column}`' for column in schema.names[:20])}."
            )
    kind, label = schema.field("logits").type, schema.field("label").type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not pa.types.is_floating(kind.value_type):
        raise InvalidUpload(f"The column `logits` must hold lists of floats, got {kind}.")
    if not (is_label(label) or (pa.types.is_dictionary(label) and is_label(label.value_type))):
        raise InvalidUpload(f"The column `label` must hold class indices or names, got {label}.")
    dtype: np.dtype[Any] = np.dtype(kind.value_type.to_pandas_dtype())
    return dtype


def _declared_values(metadata: Any) -> int:
    """How many numbers the column `logits` holds, by the footer."""
    count = 0
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if column.path_in_schema.split(".")[0] == "logits":
                count += column.num_values
    return count


def has_lists(file: IO[bytes]) -> bool:
    """Whether a `.parquet` has just the columns `logits` and `label`, or neither it nor columns by class."""
    try:
        source = pq.ParquetFile(file, buffer_size=PAGE_BYTES, thrift_container_size_limit=MAX_SCHEMA_ENTRIES)
        names = source.schema_arrow.names
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return True  # `read_parquet` says what is wrong
    finally:
        file.seek(0)
    return ("logits" in names and not {"group", "groups", SAMPLE_WEIGHT} & set(names)) or names == ["label"]


def is_label(kind: Any) -> bool:
    """Whether a column of this type may hold labels."""
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return bool(text or pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _labels(source: pq.ParquetFile, rows: int, classes: Sequence[str] | None) -> Array:
    blocks, first = [], 0
    for batch in source.iter_batches(batch_size=BATCH_BYTES // 8, columns=["label"], use_threads=False):
        column = batch.column("label")
        if column.null_count:
            raise InvalidUpload(f"label[{first + _first(column.is_null())}] is missing.")
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        blocks.append(as_indices(column.to_numpy(zero_copy_only=False), classes, first))
        first += len(column)
        if first > rows:
            break
    if first != rows:
        raise InvalidUpload(f"The footer announces {rows:,} rows, but the column `label` holds {first:,}.")
    return np.concatenate(blocks)


def _logits(source: pq.ParquetFile, rows: int, columns: int, dtype: np.dtype[Any]) -> Iterator[Array]:
    """Yield batches (n, K), or name the first row that is no list of K numbers."""
    batch_rows, first = max(1, BATCH_BYTES // (columns * dtype.itemsize)), 0
    for batch in source.iter_batches(batch_size=batch_rows, columns=["logits"], use_threads=False):
        column = batch.column("logits")
        if column.null_count:
            raise InvalidUpload(f"logits[{first + _first(column.is_null())}] is missing.")
        lengths = pc.list_value_length(column)
        wrong = pc.not_equal(lengths, columns)
        if pc.any(wrong).as_py():
            row = _first(wrong)
            raise InvalidUpload(
                f"logits[{first + row}] is a list of {lengths[row]}; it must have {columns} numbers, "
                "one for each class."
            )
        values = column.flatten()
        if values.null_count:
            row, place = divmod(_first(values.is_null()), columns)
            raise InvalidUpload(f"logits[{first + row}, {place}] is missing.")
        first += len(column)
        if first > rows:
            raise InvalidUpload(f"The footer announces {rows:,} rows, but the column `logits` holds more.")
        array: Array = values.to_numpy(zero_copy_only=False)
        yield array.reshape(-1, columns)


def _first(mask: Any) -> int:
    """Place of the first true value."""
    return int(np.flatnonzero(mask.to_numpy(zero_copy_only=False))[0])
