"""Reads validation data in JSON: `{"logits": [[...], ...], "labels": [...]}`, as a file or as a body."""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from boxcal.app.fitting.model_inputs import FEATURES, TEXTS, ModelInputs
from boxcal.app.fitting.worker.arrays import (
    SCORES,
    Header,
    check_arrays,
    check_beside,
    check_rows,
    choose,
    keep_arrays,
)
from boxcal.app.fitting.worker.labels import check_shape
from boxcal.app.fitting.worker.validation_set import GROUPS, SAMPLE_WEIGHT, Array, Expected, check_size
from boxcal.app.http.problems import InvalidUpload, MalformedBody, UploadTooLarge
from boxcal.app.predict.arrays import read_rows
from boxcal.models.errors import UnusableInput

MAX_JSON_BYTES = 64 * 2**20


def read_object(file: IO[bytes], size: int) -> dict[str, Any]:
    """Parse a JSON object.

    Raises
    ------
    UploadTooLarge
        It has more than `MAX_JSON_BYTES`.
    MalformedBody
        It is no JSON object.
    """
    if size > MAX_JSON_BYTES:
        raise UploadTooLarge(
            f"The JSON document has {size:,} bytes; the limit is {MAX_JSON_BYTES:,}. Send .npz or .parquet."
        )
    try:
        document = orjson.loads(file.read())
    except orjson.JSONDecodeError as error:
        raise MalformedBody(f"The document is not JSON: {error}.") from error
    except SystemError as error:  # what orjson raises where an allocation fails
        raise MemoryError from error
    if not isinstance(document, dict):
        raise MalformedBody("The document must be a JSON object with `labels` and `logits`.")
    return document


def read_json(document: dict[str, Any], folder: Path, expected: Expected) -> None:
    """Check the arrays of a document and keep them in `folder`; texts, and features by name, are read too.

    The errors are those of `read_npz`.
    """
    inputs, classes = expected.inputs, expected.classes
    members = choose("The document", document, inputs)
    member = members[0]
    for name in members:
        if not isinstance(document[name], list):
            raise InvalidUpload(f"`{name}` of the document must be a list.")
    count = len(document["labels"])
    arrays: dict[str, Array] = {"labels": _labels(document["labels"])}
    for name in members:
        rows = document[name]
        if inputs is not None and name == member == inputs.member:
            if len(rows) != count:
                raise InvalidUpload(f"`{name}` has {len(rows)} rows but `labels` has {count} values.")
            arrays[name] = _samples(rows, inputs)
        elif name in (*SCORES, FEATURES):
            width = len(rows[0]) if rows and isinstance(rows[0], list) else 0
            width = len(classes) if classes is not None and name in SCORES else width
            check_rows(name, (len(rows), width), count, width)
            check_size({name: 8 * len(rows) * width, "labels": 8 * count}, expected.max_bytes)
            arrays[name] = read_rows(rows, width, name)
        elif name == GROUPS:
            if len(set(map(type, rows))) != 1 or type(rows[0]) not in (int, str):
                raise InvalidUpload("`groups` must be a list of integers or of texts.")
            arrays[name] = np.array(rows)
        elif name == SAMPLE_WEIGHT:
            if not set(map(type, rows)) <= {int, float}:
                raise InvalidUpload(f"`{SAMPLE_WEIGHT}` must be a list of numbers.")
            arrays[name] = np.array(rows, np.float64)
    arrays = {name: arrays[name] for name in members}
    if inputs is None or member != inputs.member:
        headers = {name: Header(one.shape, one.dtype, False, 0) for name, one in arrays.items()}
        check_arrays(headers, member, expected)
    check_beside({name: one.shape for name, one in arrays.items()}, count)
    keep_arrays(folder, arrays, member, expected, are_samples=True)


def _samples(rows: list[Any], inputs: ModelInputs) -> Array:
    """Turn rows of features (lists, or objects by name) or texts into samples of the model."""
    if inputs.member == TEXTS:
        return np.array([*rows, None], object)[:-1]  # of one dimension, whatever was sent
    samples = inputs.rows.blank(len(rows))
    for row, one in enumerate(rows):
        try:
            samples[row] = inputs.rows.decode("features", one, 0)
        except UnusableInput as error:
            raise InvalidUpload(f"{FEATURES}[{row}]: {error}") from error
    return samples


def _labels(sent: list[Any]) -> Array:
    """Turn labels of a document, class indices or names, into an array (N,) or (N, 1)."""
    kinds = set(map(type, sent))
    if kinds == {list} and len({len(one) for one in sent}) == 1:
        check_shape((len(sent), len(sent[0])))
        return _labels([one[0] for one in sent])
    if not (kinds <= {int, float} or kinds == {str}):
        raise InvalidUpload("`labels` must be a list of class indices or of class names.")
    try:
        return np.array(sent, np.float64 if float in kinds else None)
    except OverflowError:
        raise InvalidUpload("`labels` holds an integer that is too large.") from None
