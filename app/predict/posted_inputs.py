"""Turns the body of `/predict` into its inputs: images, tensors, rows, texts and tokens."""

from __future__ import annotations

import binascii
import csv
import io
import math
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from boxcal.app.errors import InvalidInput, InvalidParameter, TooManySamples
from boxcal.app.nearest import hint
from boxcal.app.predict import large_json
from boxcal.app.predict.bodies import CSV, FORM, IMAGES, TEXT, Posted
from boxcal.app.predict.large_json import Fold, Folded
from boxcal.models.errors import BackboneError
from boxcal.models.inputs import Inputs as ModelInputs

MEMBERS: Mapping[str, type | tuple[type, ...]] = {
    "tensor": list, "features": (list, dict), "text": str, "tokens": dict,
}  # fmt: skip
"""What one input of a JSON body may be besides an image, and its type."""
WRITTEN = {
    "image": '{"image": "<base64>"}',
    "tensor": '{"tensor": [...]}',
    "features": '{"features": [...]}',
    "text": '{"text": "..."}',
    "tokens": '{"tokens": {...}}',
}


class Input(NamedTuple):
    """One input of `/predict`: an encoded image as bytes, or a member of the input's JSON object."""

    member: str
    value: Any


def inputs_of(posted: Posted, limit: int, members: Sequence[str]) -> list[Input]:
    """Return the inputs of a body of `/predict` that is not `.npy`; large JSON bodies take a while.

    Parameters
    ----------
    limit
        Most inputs of a request.
    members
        What one input of the model may be, for messages.

    Raises
    ------
    InvalidParameter, InvalidInput, TooManySamples
        Naming the input.
    """
    if posted.kind in IMAGES:
        return [Input("image", posted.content)]
    if posted.kind == TEXT:
        return [Input("text", _decoded(posted.content))]
    if posted.kind == CSV:
        return _csv_rows(posted.content, limit)
    sent = posted.content
    if isinstance(sent, Folded):
        return [item for part in sent.parts for item in part]
    if not isinstance(sent, list) or not sent:
        raise InvalidParameter(f"inputs must be a list of at least one of {_written(members)}.")
    if len(sent) > limit:
        raise TooManySamples(f"The request holds {len(sent)} samples; the queue takes at most {limit}.")
    if posted.kind == FORM:
        return [Input("image", file) for file in sent]
    return [_input(item, f"inputs[{n}]", members) for n, item in enumerate(sent)]


def inputs_fold(limit: int, inputs: ModelInputs) -> Fold:
    """Read the inputs of a large JSON body as they are parsed.

    Parameters
    ----------
    limit
        Most inputs of a request.
    inputs
        Decodes the tensors.
    """

    def of_run(run: list[Any], first: int) -> list[Input]:
        if first + len(run) > limit:
            raise TooManySamples(f"The request holds more samples than the queue takes, {limit}.")
        return [decoded(item, f"inputs[{position}]") for position, item in enumerate(run, first)]

    def decoded(item: Any, name: str) -> Input:
        sent = _input(item, name, inputs.members)
        if sent.member != "tensor" or sent.member not in inputs.members:
            return sent
        try:
            return Input(sent.member, inputs.decode(sent.member, sent.value, 0))
        except BackboneError as error:
            raise InvalidInput(f"{name}: {error}") from error

    has_tensors = "tensor" in inputs.members
    return Fold(of_run, math.prod(inputs.shape) if has_tensors else large_json.MAX_VALUES)


def _input(item: Any, name: str, members: Sequence[str]) -> Input:
    if isinstance(item, dict):
        if len(item) == 1 and isinstance(text := item.get("image"), str | memoryview):
            return Input("image", from_base64(text, name))
        item = {
            key: large_json.text_of(one) if isinstance(one, memoryview) else one for key, one in item.items()
        }
    if isinstance(item, dict) and len(item) == 1:
        member, value = next(iter(item.items()))
        if isinstance(value, MEMBERS.get(member, ())):
            return Input(member, value)
    unknown = next(iter(item), None) if isinstance(item, dict) and len(item) == 1 else None
    known = [member for member in members if member in WRITTEN]
    meant = hint(unknown, known) if isinstance(unknown, str) and unknown not in known else ""
    raise InvalidParameter(f"{name} must be {_written(members)}, got {reprlib.repr(item)}{meant or '.'}")


def _written(members: Sequence[str]) -> str:
    """Show what one input of the model may be."""
    return " or ".join(WRITTEN[member] for member in members if member in WRITTEN) or "an input of a model"


def _csv_rows(body: bytes, limit: int) -> list[Input]:
    """Read rows of features; the first line names the columns.

    Raises
    ------
    InvalidInput, TooManySamples
        Naming the line.
    """
    reader = csv.DictReader(io.StringIO(_decoded(body), newline=""), strict=True)
    rows: list[Input] = []
    try:
        for row in reader:
            if None in row or None in row.values():
                raise InvalidInput(
                    f"line {reader.line_num} does not have {len(reader.fieldnames or ())} values, one for "
                    "each column that the first line names."
                )
            if len(rows) == limit:
                raise TooManySamples(
                    f"The request holds more than {limit} samples, which the queue can take."
                )
            rows.append(Input("cells", row))
    except csv.Error as error:
        raise InvalidInput(f"line {reader.line_num} is no readable CSV: {error}.") from error
    if not rows:
        raise InvalidInput("The CSV document has no rows.")
    return rows


def _decoded(body: bytes) -> str:
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(f"The text is not UTF-8: {error}.") from error


def from_base64(text: str | memoryview, name: str) -> bytes:
    """Decode an image in base64 in pieces, so that other threads can run between.

    Raises
    ------
    InvalidInput
        It is not base64; `name` names the input.
    """
    piece = 4 * large_json.PIECE
    decoded = []
    try:
        for start in range(0, len(text), piece):
            decoded.append(binascii.a2b_base64(text[start : start + piece], strict_mode=True))
            if start + piece < len(text) and len(decoded[-1]) != piece // 4 * 3:
                raise ValueError("excess data after padding")
    except ValueError as error:
        raise InvalidInput(f"{name}: The image is not base64: {error}.") from error
    return b"".join(decoded)
