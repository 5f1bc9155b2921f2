"""Labelled rows of features and texts in place of logits: the check keeps them, the fit runs the model.

The check writes them to an Arrow file, one column for each feature or one of texts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import ipc, types

from boxcal.app.fitting.model_inputs import FEATURES, TEXTS, ModelInputs
from boxcal.app.fitting.worker.validation_set import SAMPLES, Array, check_count, check_size
from boxcal.app.http.problems import InvalidUpload, UploadTooLarge
from boxcal.models.errors import UnusableInput
from boxcal.models.inputs.base import Inputs
from boxcal.models.inputs.rows import Column, RowInputs
from boxcal.models.inputs.texts import TextInputs

MAX_TEXT_BYTES = 2**20


def keep_samples(folder: Path, inputs: ModelInputs, blocks: Iterable[Array], max_bytes: int) -> int:
    """Write samples into `folder`, and return how many there are.

    Parameters
    ----------
    blocks
        Checked rows of features (n, D), or texts (n,).
    max_bytes
        How large they may be, all together.

    Raises
    ------
    InvalidUpload, UploadTooLarge
        There are too few of them; they are larger than the limit, or a text is.
    """
    schema, count, size = _schema(inputs), 0, 0
    with (folder / SAMPLES).open("wb") as file, ipc.new_file(file, schema) as out:
        for block in blocks:
            if inputs.member == TEXTS:
                _check_texts(block, count)
            columns = block.T if inputs.member == FEATURES else [block]
            arrays = [
                pa.array(np.ascontiguousarray(one), kind)
                for one, kind in zip(columns, schema.types, strict=True)
            ]
            batch = pa.record_batch(arrays, schema=schema)
            count, size = count + len(batch), size + batch.nbytes
            check_size({inputs.member: size, "labels": 8 * count}, max_bytes)
            out.write_batch(batch)
    check_count(count)
    return count


def kept_samples(folder: Path, inputs: Inputs, rows: int) -> Iterator[Array]:
    """Yield what `keep_samples` wrote, at most `rows` samples at a time, as samples of the model.

    Raises
    ------
    ValueError
        Naming the text that has no tokens.
    """
    first = 0
    with (folder / SAMPLES).open("rb") as file, ipc.open_file(file) as reader:
        for number in range(reader.num_record_batches):
            whole = reader.get_batch(number)
            for start in range(0, len(whole), rows):
                batch = whole.slice(start, rows)
                if isinstance(inputs, RowInputs):
                    columns = [one.to_numpy(zero_copy_only=False) for one in batch.columns]
                    yield inputs.of_columns(columns, first, FEATURES)
                else:
                    yield tokens_of(batch.column(0).to_pylist(), inputs, first)
                first += len(batch)


def features_of(batch: pa.RecordBatch, inputs: RowInputs, first: int) -> Array:
    """Read the rows of features of a batch of a table, the first of which has the number `first`.

    Raises
    ------
    InvalidUpload, UnusableInput
        Naming the column, or the row and the value, that the model does not read.
    """
    columns = [
        _values(batch.column(name), column, name, first)
        for column, name in zip(inputs.by_feature, inputs.names, strict=True)
    ]
    return inputs.of_columns(columns, first, FEATURES)


def texts_of(batch: pa.RecordBatch, name: str, first: int) -> Array:
    """Read the texts of a batch of a table.

    Raises
    ------
    InvalidUpload
        The column holds something else; naming the row without a text.
    """
    column = _decoded(batch.column(name))
    if not _is_text(column.type):
        raise InvalidUpload(f"The column `{name}` must hold texts, got {column.type}.")
    if column.null_count:
        raise InvalidUpload(f"{name}[{first + int(np.flatnonzero(column.is_null())[0])}] is missing.")
    return np.asarray(column.to_numpy(zero_copy_only=False))


def tokens_of(texts: list[str], inputs: Inputs, first: int) -> Array:
    """Turn texts into samples of a model.

    Raises
    ------
    ValueError
        Naming the text that has no tokens.
    """
    if not isinstance(inputs, TextInputs):
        raise ValueError(inputs.refusal("text"))
    try:
        return inputs.of_texts(texts, first)
    except UnusableInput as error:
        raise ValueError(str(error)) from error


def _schema(inputs: ModelInputs) -> pa.Schema:
    if inputs.member == TEXTS:
        return pa.schema([("text", pa.string())])
    features = inputs.rows.by_feature
    return pa.schema(
        [(str(n), pa.string() if one.is_text else pa.float64()) for n, one in enumerate(features)]
    )


def _check_texts(texts: Array, first: int) -> None:
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidUpload(f"texts[{first + row}] is {text!r:.100}; it must be a string.")
        if len(text) > MAX_TEXT_BYTES // 4 and (size := len(text.encode())) > MAX_TEXT_BYTES:
            raise UploadTooLarge(
                f"texts[{first + row}] has {size:,} bytes; a text may have {MAX_TEXT_BYTES:,}."
            )


def _values(column: Any, wanted: Column, name: str, first: int) -> Array:
    """Return the values of one feature: strings, or float64 with NaN for missing ones."""
    column = _decoded(column)
    kind = column.type
    if wanted.is_text and not _is_text(kind):
        raise InvalidUpload(f"The column {name!r:.100} must hold strings, got {kind}.")
    if not wanted.is_text:
        if _is_text(kind):
            return _numbers(column, name, first)
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


def _numbers(column: Any, name: str, first: int) -> Array:
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
            numbers[row] = np.nan if text is None else float(text)
        except ValueError:
            raise InvalidUpload(
                f"{FEATURES}[{first + row}]: The feature {name!r:.100} is {text!r:.100}; it is a number."
            ) from None
    return numbers


def _decoded(column: Any) -> Any:
    return column.dictionary_decode() if types.is_dictionary(column.type) else column


def _is_text(kind: Any) -> bool:
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))
