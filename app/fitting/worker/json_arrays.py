"""Reads validation data in JSON: `{"logits": [[...], ...], "labels": [...]}`, as a file or as a body.

For models of features or texts, `features` (lists, or objects by name) or `texts` may replace the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import orjson

from boxcal.app.fitting.model_inputs import FEATURES, TEXTS, ModelInputs, either_of
from boxcal.app.fitting.worker.labels import as_indices, check_shape
from boxcal.app.fitting.worker.memory import room
from boxcal.app.fitting.worker.validation_set import (
    SAMPLE_WEIGHT,
    Array,
    check_shapes,
    check_size,
    keep,
    keep_groups,
    keep_labels,
    keep_weights,
    refuse_weights,
)
from boxcal.app.http.problems import InvalidUpload, MalformedBody, UploadTooLarge
from boxcal.app.predict.arrays import read_rows
from boxcal.app.settings.nearest import hint
from boxcal.models.errors import UnusableInput

MAX_JSON_BYTES = 64 * 2**20
BLOCK_ROWS = 8192
PARSED_FACTOR = 24
"""What a parsed document takes in memory, relative to its size: `[[],[],...]` takes the most."""
SCORES = ("logits", "probabilities")
ARRAYS = (*SCORES, "labels", FEATURES, TEXTS, "groups", SAMPLE_WEIGHT)


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
    try:  # around the limit, because words about a failed allocation take memory too
        with room(PARSED_FACTOR * size + 16 * 2**20):
            document = orjson.loads(file.read())
    except orjson.JSONDecodeError as error:
        raise MalformedBody(f"The document is not JSON: {error}.") from error
    except (MemoryError, SystemError) as error:  # what orjson raises where an allocation fails
        raise UploadTooLarge(
            f"The document of {size:,} bytes takes more than {PARSED_FACTOR} times its size in memory. "
            "Send .npz or .parquet."
        ) from error
    if not isinstance(document, dict):
        raise MalformedBody("The document must be a JSON object with `labels` and `logits`.")
    return document


def read_arrays(
    document: dict[str, Any],
    folder: Path,
    *,
    classes: Sequence[str] | None,
    max_bytes: int,
    inputs: ModelInputs | None = None,
) -> None:
    """Check the arrays of a document and keep them in `folder`.

    Parameters
    ----------
    classes
        The K class names of the backbone; None to accept any K.
    max_bytes
        How large the arrays may be, converted.
    inputs
        Of a model of features or texts, which may be sent in place of logits.

    Raises
    ------
    InvalidUpload, InvalidLogits, UploadTooLarge
        Names the member, the place and the value that cannot be accepted.
    """
    refuse_weights(list(document))
    for name in document:
        if name not in ARRAYS:
            raise InvalidUpload(f"The document has a member {name!r:.100}{hint(name, ARRAYS)}.")
    found = [name for name in SCORES if name in document]
    if inputs is not None and inputs.check_member(list(document)):
        found = [inputs.member]
    if TEXTS in document and TEXTS not in found:
        raise InvalidUpload("The document has a member 'texts', which this model does not read.")
    if len(found) != 1 or "labels" not in document:
        raise InvalidUpload(f"The document needs `labels` and {either_of(inputs)}.")
    (name,) = found
    rows, sent = document[name], document["labels"]
    if not isinstance(sent, list) or not isinstance(rows, list):
        raise InvalidUpload(f"`{name}` and `labels` must be lists.")
    labels = _labels(sent)
    check_shape(labels.shape)
    if inputs is not None and name == inputs.member:
        if len(rows) != len(labels):
            raise InvalidUpload(f"`{name}` has {len(rows)} rows but `labels` has {len(labels)} values.")
        keep_labels(folder, as_indices(labels.ravel(), inputs.labels), len(inputs.labels))
        _keep_samples(rows, folder, inputs, max_bytes)
        _keep_besides(document, folder, len(labels))
        return
    width = len(classes) if classes is not None else _width(rows)
    check_shapes(name, (len(rows), width), labels.shape, width)
    sizes = {name: 8 * len(rows) * width, "labels": 8 * len(sent)}
    check_size(sizes, max_bytes)
    keep_labels(folder, as_indices(labels.ravel(), classes), width)
    keep(folder, name, (len(rows), width), np.dtype(np.float64), [read_rows(rows, width, name)])
    _keep_besides(document, folder, len(labels))
    if (features := document.get("features")) is not None:
        width = _width(features)
        check_size({**sizes, "features": 8 * len(labels) * width}, max_bytes)
        if not isinstance(features, list) or len(features) != len(labels):
            raise InvalidUpload(f"`features` must be a list of {len(labels)} rows.")
        values = read_rows(features, width, "features")
        keep(folder, "features", values.shape, values.dtype, [values])


def _keep_samples(sent: list[Any], folder: Path, inputs: ModelInputs, max_bytes: int) -> None:
    """Check rows of features or texts, and keep them for the model."""
    from boxcal.app.fitting.worker.samples import keep_samples  # noqa: PLC0415 - pyarrow takes long to load

    def blocks() -> Iterator[Array]:
        rows = inputs.rows
        for first in range(0, len(sent), BLOCK_ROWS):
            part = sent[first : first + BLOCK_ROWS]
            if inputs.member == TEXTS:
                yield np.array([*part, None], object)[:-1]  # of one dimension, whatever was sent
                continue
            block = rows.blank(len(part))
            for row, one in enumerate(part):
                try:
                    block[row] = rows.decode("features", one, 0)
                except UnusableInput as error:
                    raise InvalidUpload(f"{FEATURES}[{first + row}]: {error}") from error
            yield block

    keep_samples(folder, inputs, blocks(), max_bytes)


def _keep_besides(document: dict[str, Any], folder: Path, samples: int) -> None:
    """Check the groups and the weights, if there are any, and keep them."""
    if (groups := document.get("groups")) is not None:
        if (
            not isinstance(groups, list)
            or len(set(map(type, groups))) != 1
            or type(groups[0]) not in (int, str)
        ):
            raise InvalidUpload("`groups` must be a list of integers or of texts.")
        keep_groups(folder, np.array(groups), samples)
    if (weights := document.get(SAMPLE_WEIGHT)) is not None:
        if not isinstance(weights, list) or not set(map(type, weights)) <= {int, float}:
            raise InvalidUpload(f"`{SAMPLE_WEIGHT}` must be a list of numbers.")
        keep_weights(folder, np.array(weights, np.float64), samples)


def _width(rows: Any) -> int:
    first = rows[0] if isinstance(rows, list) and rows else None
    return len(first) if isinstance(first, list) else 0


def _labels(sent: list[Any]) -> Any:
    kinds = set(map(type, sent))
    if kinds <= {int, float} or kinds == {str}:
        try:
            return np.array(sent, np.float64 if float in kinds else None)
        except OverflowError:
            raise InvalidUpload("`labels` holds an integer that is too large.") from None
    if kinds == {list}:
        widths = {len(one) for one in sent}
        if len(widths) == 1 and (width := widths.pop()) != 1:
            check_shape((len(sent), width))
        if all(len(one) == 1 for one in sent):
            return _labels([one[0] for one in sent])
    raise InvalidUpload("`labels` must be a list of class indices or of class names.")
