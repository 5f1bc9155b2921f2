"""Reads an uploaded `.parquet`, columns `logits` (a list per row) and `label`, in pieces, onto the disk."""

from __future__ import annotations

from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from boxcal.app.fitting.errors import InvalidUpload, UploadTooLarge
from boxcal.app.fitting.validation_set import check_shapes

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = 16 * 2**20

Arrays = tuple[npt.NDArray[Any], npt.NDArray[Any]]


def read_parquet(file: IO[bytes], raw: Path, *, num_classes: int, max_bytes: int) -> Arrays:
    """Copy the two columns into arrays.

    Parameters
    ----------
    file
        Seekable; not closed here.
    raw
        File to copy the logits to.
    max_bytes
        How large the arrays may be.

    Returns
    -------
    Logits (N, K), mapped from `raw`, and labels (N,).

    Raises
    ------
    InvalidUpload
        A column is missing or of another type, or a row has another number of logits or none.
    UploadTooLarge
        The arrays would be larger than `max_bytes`.
    """
    import pyarrow as pa  # noqa: PLC0415 - costs every start for the few who upload parquet
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        source = pq.ParquetFile(file)
        dtype = _check_schema(source.schema_arrow)
        rows = source.metadata.num_rows
        size = rows * num_classes * dtype.itemsize
        if size > max_bytes:
            raise UploadTooLarge(
                f"{rows:,} rows of {num_classes} logits unpack to {size:,} bytes; the limit is {max_bytes:,}."
            )
        check_shapes("logits", (rows, num_classes), (rows,), num_classes)
        logits = np.memmap(raw, dtype=dtype, mode="w+", shape=(rows, num_classes))
        labels = np.empty(rows, dtype=np.int64)
        first = 0
        batch_rows = max(1, BATCH_BYTES // (num_classes * dtype.itemsize))
        for batch in source.iter_batches(batch_size=batch_rows, columns=["logits", "label"]):
            last = first + batch.num_rows
            logits[first:last] = _lists(batch.column("logits"), num_classes, first)
            labels[first:last] = _labels(batch.column("label"), first)
            first = last
    except (pa.ArrowException, OSError) as error:
        raise InvalidUpload(f"The file is no readable .parquet: {error}") from error
    return logits, labels


def _check_schema(schema: pa.Schema) -> np.dtype[Any]:
    """Refuse other columns and types than are read, and say of which dtype the logits are."""
    import pyarrow as pa  # noqa: PLC0415

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
    if not pa.types.is_integer(label):
        raise InvalidUpload(f"The column `label` must hold integers (class indices), got {label}.")
    dtype: np.dtype[Any] = np.dtype(kind.value_type.to_pandas_dtype())
    return dtype


def _lists(column: Any, num_classes: int, first: int) -> npt.NDArray[Any]:
    """Turn a batch of lists into an (n, K) array, or name the first row that is no list of K numbers."""
    import pyarrow.compute as pc  # noqa: PLC0415

    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    # A missing list makes the lengths floats, with nan in its place.
    wrong = np.flatnonzero(lengths != num_classes)
    if wrong.size:
        row = int(wrong[0])
        found = "missing" if np.isnan(lengths[row]) else f"a list of {int(lengths[row])}"
        raise InvalidUpload(
            f"logits[{first + row}] is {found}; the backbone served here has {num_classes} classes."
        )
    values = column.flatten()
    if values.null_count:
        row, place = divmod(
            int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0]), num_classes
        )
        raise InvalidUpload(f"logits[{first + row}, {place}] is missing.")
    array: npt.NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array.reshape(-1, num_classes)


def _labels(column: Any, first: int) -> npt.NDArray[Any]:
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise InvalidUpload(f"label[{first + row}] is missing.")
    array: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return array
