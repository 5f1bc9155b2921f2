"""Turns the columns of a table into the arrays of a validation set, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from boxcal.app.http.problems import InvalidUpload
from boxcal.app.tables.arrays import Array, Batch
from boxcal.app.tables.columns import GROUPS, SAMPLE_WEIGHT, Columns
from boxcal.app.tables.formats import BATCH_ROWS, DECIMAL, OpenTable
from boxcal.app.tables.labels import label_names
from boxcal.app.tables.sample_schema import FEATURES, TEXTS, ModelInputs, naming_samples
from boxcal.calibrators.scores import two_columns
from boxcal.models.inputs.rows import Column, RowInputs, number_of

WITH_COMMA = r"^(\s*[-+]?\d*),(\d+(?:[eE][-+]?\d+)?\s*)$"
WHOLE_WITH_COMMA = r"^(\s*-?\d+),(0+\s*)$"


def arrays_of(
    batches: Iterator[pa.RecordBatch],
    columns: Columns,
    inputs: ModelInputs | None,
) -> Iterator[Batch]:
    """Convert the batches of a table to arrays by name: scores or samples, `labels` and the rest."""
    first = width = 0
    for batch in batches:
        if columns.has_samples and inputs is not None:
            with naming_samples():
                block = samples_of_batch(batch, inputs, columns.names, first)
        else:
            block = scores_of_batch(batch, columns, first, width)
            width = block.shape[1]
        found = {
            columns.kind: block,
            "labels": label_values(label_column(batch, columns.label), columns.label, first),
        }
        if columns.group:
            found[GROUPS] = _groups(batch.column(columns.group), columns.group, first)
        if columns.weight:
            found[SAMPLE_WEIGHT] = _weights(with_points(batch, columns.weight), first)
        yield found
        first += len(batch)
    if not first:
        raise InvalidUpload("The table has no rows.")


def scores_of_batch(batch: pa.RecordBatch, columns: Columns, first: int, width: int = 0) -> Array:
    """Return the scores (n, K) of a batch of rows, the first of which has the number `first`."""
    if columns.is_list:
        name = columns.names[0]
        column = _complete(with_points(batch, name), name, first)
        may_be_single = columns.classes is None or len(columns.classes) == 2
        second = _single(column, name, first) if may_be_single and width in (0, 2) else None
        return lists_of(column, name, first, width) if second is None else two_columns(second, columns.kind)
    parts = []
    for name in columns.names:
        column = with_points(batch, name)
        if not (types.is_floating(column.type) or types.is_integer(column.type)):
            raise InvalidUpload(f"The column {name!r:.100} must hold numbers, got {column.type}.")
        parts.append(_complete(column, name, first).to_numpy(zero_copy_only=False))
    return np.stack(parts, axis=1)


def samples_of_batch(batch: pa.RecordBatch, inputs: ModelInputs, names: Sequence[str], first: int) -> Array:
    """Read the rows of features (n, D), or the texts (n,), of a batch of a table from the columns `names`."""
    if inputs.member == TEXTS:
        column = _decoded(batch.column(names[0]))
        if not is_text(column.type):
            raise InvalidUpload(f"The column `{names[0]}` must hold texts, got {column.type}.")
        return np.asarray(_complete(column, names[0], first).to_numpy(zero_copy_only=False))
    rows = RowInputs(inputs.columns, names, has_missing=inputs.has_missing)
    columns = [
        _feature(batch.column(name) if column.is_text else with_points(batch, name), column, name, first)
        for column, name in zip(rows.by_feature, names, strict=True)
    ]
    return rows.of_columns(columns, first, FEATURES)


def _single(column: Any, name: str, first: int) -> Array | None:
    """Give the numbers of a column (n,); None where it holds lists."""
    if is_text(column.type):
        if str(column[0]).lstrip().startswith("["):
            return None
        return _numbers(column, name, first)
    is_number = types.is_floating(column.type) or types.is_integer(column.type)
    return column.to_numpy(zero_copy_only=False).astype(np.float64) if is_number else None


def lists_of(column: Any, name: str, first: int, width: int = 0) -> Array:
    """Bring a column of lists to (n, K), or name the first row of another length than `width`."""
    kind = _complete(column, name, first).type
    if is_text(kind):
        return _written_lists(column, name, first, width)
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not (types.is_floating(kind.value_type) or types.is_integer(kind.value_type)):
        raise InvalidUpload(f"The column `{name}` must hold lists of numbers, got {kind}.")
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


def label_values(column: Any, name: str, first: int) -> Array:
    """Give the labels of a column (n,), as numbers or texts."""
    column = _complete(_decoded(column), name, first)
    kind = column.type
    if types.is_binary(kind) or types.is_large_binary(kind):
        column, kind = pc.cast(column, pa.string()), pa.string()
    if not (is_text(kind) or types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind)):
        several = ", several labels at once" if types.is_list(kind) else ""
        raise InvalidUpload(f"The column `{name}` must hold class indices or names, got {kind}{several}.")
    return _filled(np.asarray(column.to_numpy(zero_copy_only=False)), name, first)


def distinct_labels(table: OpenTable, name: str) -> tuple[list[str], int]:
    """List the values of the column of labels, sorted, as `label_names` gives them; count rows."""
    found: set[str] = set()
    first = 0
    for batch in table.batches([name], (), BATCH_ROWS):
        values = label_values(label_column(batch, name), name, first)
        first += len(batch)
        found.update(map(str, np.unique(values).tolist() if values.dtype.kind in "iufb" else set(values)))
    if not first:
        raise InvalidUpload("The table has no rows.")
    return sorted(label_names(found)), first


def _groups(column: Any, name: str, first: int) -> Array:
    column = _complete(_decoded(column), name, first)
    if not (is_text(column.type) or types.is_integer(column.type)):
        raise InvalidUpload(f"The column `{name}` must hold integers or texts, got {column.type}.")
    values = _filled(np.asarray(column.to_numpy(zero_copy_only=False)), name, first)
    return values.astype(np.int64 if values.dtype.kind in "iu" else str)


def _weights(column: Any, first: int) -> Array:
    kind = _complete(column, SAMPLE_WEIGHT, first).type
    if not (types.is_floating(kind) or types.is_integer(kind) or is_text(kind)):
        raise InvalidUpload(f"The column `{SAMPLE_WEIGHT}` must hold numbers, got {kind}.")
    if not is_text(kind):
        return np.asarray(pc.cast(column, pa.float64()).to_numpy(zero_copy_only=False))
    values = _numbers(column, SAMPLE_WEIGHT, first)
    if (missing := np.flatnonzero(np.isnan(values))).size:
        raise InvalidUpload(f"{SAMPLE_WEIGHT}[{first + int(missing[0])}] is missing.")
    return values


def _feature(column: Any, wanted: Column, name: str, first: int) -> Array:
    """Return the values of one feature: strings, or float64 with NaN for missing ones."""
    column = _decoded(column)
    kind = column.type
    if wanted.is_text and not is_text(kind):
        raise InvalidUpload(f"The column {name!r:.100} must hold strings, got {kind}.")
    if not wanted.is_text:
        if is_text(kind):
            return _numbers(column, name, first, FEATURES)
        if not (
            types.is_floating(kind)
            or types.is_integer(kind)
            or types.is_boolean(kind)
            or types.is_decimal(kind)
            or types.is_null(kind)
        ):
            raise InvalidUpload(f"The column {name!r:.100} must hold numbers, got {kind}.")
        column = pc.cast(column, pa.float64(), safe=False)
    return np.asarray(column.to_numpy(zero_copy_only=False))


def _numbers(column: Any, name: str, first: int, place: str = "") -> Array:
    """Read numbers that a text file writes; an empty cell is a missing value."""
    trimmed = pc.utf8_trim_whitespace(column)
    present = pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, trimmed.type), trimmed)
    try:
        return np.asarray(pc.cast(present, pa.float64()).to_numpy(zero_copy_only=False))
    except pa.ArrowInvalid:
        pass
    numbers = np.full(len(column), np.nan)
    for row, text in enumerate(present.to_pylist()):
        try:
            numbers[row] = np.nan if text is None else number_of(text)
        except ValueError:
            said = (
                f"{place}[{first + row}]: The feature {name!r:.100}"
                if place
                else f"{name:.100}[{first + row}]"
            )
            raise InvalidUpload(f"{said} is {text!r:.100}; it is a number.") from None
    return numbers


def with_points(batch: pa.RecordBatch, name: str, pattern: str = WITH_COMMA) -> Any:
    """Give a column that may hold numbers as texts, with a point where the file has a decimal comma."""
    column = _decoded(batch.column(name))
    if is_text(column.type) and (batch.schema.metadata or {}).get(DECIMAL) == b",":
        column = pc.replace_substring_regex(column, pattern, r"\1.\2")
    return column


def label_column(batch: pa.RecordBatch, name: str) -> Any:
    """Give the column of the labels: of its texts, whole numbers alone may have a decimal comma."""
    return with_points(batch, name, WHOLE_WITH_COMMA)


def _decoded(column: Any) -> Any:
    return without_decimals(column.dictionary_decode() if types.is_dictionary(column.type) else column)


def without_decimals(column: Any) -> Any:
    """Turn decimals, which databases also export integers as, into integers or floats.

    Floats by way of their texts: Arrow itself rounds some of them to a neighbour.
    """
    if not types.is_decimal(column.type):
        return column
    if not column.type.scale:
        return pc.cast(column, pa.int64())
    return pc.cast(pc.cast(column, pa.string()), pa.float64())


def is_text(kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _complete(column: Any, name: str, first: int) -> Any:
    """Return a column, or name its first row without a value."""
    if column.null_count:
        raise InvalidUpload(f"{name}[{first + _first_null(column)}] is missing.")
    return column


def _filled(values: Array, name: str, first: int) -> Array:
    """Return labels or groups, or name the first row whose cell is empty: a CSV has no null."""
    if values.dtype.kind == "O" and len(empty := np.flatnonzero(values == "")):
        raise InvalidUpload(f"{name}[{first + int(empty[0])}] is missing.")
    return values


def _first_null(column: Any) -> int:
    return int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
