"""Labelled rows of features and texts in place of logits: the check keeps them, the fit runs the model.

The check writes them to an Arrow file, one column for each feature or one of texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from boxcal.app.http.problems import InvalidUpload, UploadTooLarge
from boxcal.app.tables.model_inputs import FEATURES, TEXTS, ModelInputs
from boxcal.models.errors import UnusableInput
from boxcal.models.inputs.base import Inputs
from boxcal.models.inputs.rows import RowInputs
from boxcal.models.inputs.texts import TextInputs

SAMPLES = "samples.arrow"
MAX_TEXT_BYTES = 2**20

Array = NDArray[Any]


class SampleWriter:
    """Writes samples of a model into a folder, block by block; a context manager."""

    def __init__(self, folder: Path, inputs: ModelInputs) -> None:
        inputs.check_tokenizer()
        self._is_text, self._count = inputs.member == TEXTS, 0
        fields = [("text", pa.string())]
        if not self._is_text:
            columns = enumerate(inputs.rows.by_feature)
            fields = [(str(n), pa.string() if one.is_text else pa.float64()) for n, one in columns]
        self._schema = pa.schema(fields)
        self._file = (folder / SAMPLES).open("wb")
        self._out = ipc.new_file(self._file, self._schema)

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()
        self._file.close()

    def append(self, block: Array) -> int:
        """Write checked rows of features (n, D), or texts (n,), and return how many bytes they have."""
        if self._is_text:
            _check_texts(block, self._count)
        columns = [block] if self._is_text else block.T
        arrays = [
            pa.array(np.ascontiguousarray(one), kind)
            for one, kind in zip(columns, self._schema.types, strict=True)
        ]
        batch = pa.record_batch(arrays, schema=self._schema)
        self._out.write_batch(batch)
        self._count += len(batch)
        return int(batch.nbytes)


def kept_samples(folder: Path, inputs: Inputs, rows: int) -> Iterator[Array]:
    """Yield what `SampleWriter` wrote, at most `rows` samples at a time, as samples of the model."""
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


def tokens_of(texts: list[str], inputs: Inputs, first: int) -> Array:
    """Turn texts into samples of a model."""
    if not isinstance(inputs, TextInputs):
        raise ValueError(inputs.refusal("text"))
    try:
        return inputs.of_texts(texts, first)
    except UnusableInput as error:
        raise ValueError(str(error)) from error


def _check_texts(texts: Array, first: int) -> None:
    for row, text in enumerate(texts):
        if not isinstance(text, str):
            raise InvalidUpload(f"texts[{first + row}] is {text!r:.100}; it must be a string.")
        if len(text) > MAX_TEXT_BYTES // 4 and (size := len(text.encode())) > MAX_TEXT_BYTES:
            raise UploadTooLarge(
                f"texts[{first + row}] has {size:,} bytes; a text may have {MAX_TEXT_BYTES:,}."
            )
