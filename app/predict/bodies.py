"""Reads the body of a request: from each content type of the contract to inputs and options."""

from __future__ import annotations

import asyncio
import binascii
import csv
import io
import json
import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import orjson
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request

from boxcal.app.errors import (
    BadRequest,
    InvalidInput,
    InvalidParameter,
    MalformedBody,
    TooManySamples,
    UnsupportedMediaType,
)
from boxcal.app.predict import large_json
from boxcal.app.predict import options as request_options
from boxcal.app.predict.large_json import Body, Fold, Folded
from boxcal.app.predict.options import Options
from boxcal.models.errors import BackboneError
from boxcal.models.inputs import Inputs as ModelInputs

IMAGES = ("image/jpeg", "image/png", "image/webp")
JSON = "application/json"
FORM = "multipart/form-data"
NPY = "application/x-npy"
CSV = "text/csv"
TEXT = "text/plain"
PREDICT_TYPES = (*IMAGES, FORM, JSON, NPY, CSV, TEXT)
CALIBRATE_TYPES = (JSON, NPY)
NAN_LIMIT = 2**20
"""Bodies up to this size that are JSON except for NaN are parsed again to name the number."""


class Input(NamedTuple):
    """One input of `/predict`: an encoded image as bytes, or a member of the input's JSON object."""

    member: str
    value: Any


LOGITS, PROBABILITIES = "logits", "probabilities"
COPIED = 2**20
"""Up to this many bytes are copied on the event loop: a tenth of a millisecond."""
SCORES = (LOGITS, PROBABILITIES)
"""What `/calibrate` takes: a member of a JSON body, or the query parameter `scores` with an array."""

MEMBERS: Mapping[str, type | tuple[type, ...]] = {
    "tensor": list, "features": (list, dict), "text": str, "tokens": dict,
}  # fmt: skip
"""What one input of a JSON body may be besides an image, and its type."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Posted:
    """What a client posted.

    Attributes
    ----------
    kind
        The content type.
    content
        The body's bytes; of JSON and forms, its inputs: the member that the route names, or the files. A long
        list in a large JSON body is `Folded`.
    member
        The member of a JSON body that holds the inputs, or its equivalent for other bodies.
    size
        Bytes of the body.
    """

    kind: str
    content: Any
    member: str
    options: Options
    size: int


async def read(
    request: Request,
    kinds: tuple[str, ...],
    folds: Mapping[str, Fold],
    check_room: Callable[[Options], None] | None = None,
) -> Posted:
    """Read a body and the options, which JSON and forms hold and other bodies have in the query string.

    Parameters
    ----------
    kinds
        The content types that the route accepts.
    folds
        By the names that the inputs may have in a JSON body, of which it has one: what becomes of them where
        they are a long list. Of several names, the query parameter `scores` chooses one for an array.
    check_room
        Called before any byte of the body is read, with the options as far as they are known; may refuse.

    Raises
    ------
    UnsupportedMediaType, MalformedBody, InvalidParameter
        What is wrong with it.
    """
    kind = header(request, b"content-type").partition(";")[0].strip().lower()
    if kind not in kinds:
        sent = f"{kind!r:.100}" if kind else "missing"
        raise UnsupportedMediaType(f"The content type is {sent}; this route accepts {', '.join(kinds)}.")
    holds_options = kind in (JSON, FORM)
    if holds_options and request.scope["query_string"]:
        _check_defaults(request, tuple(folds))
    members = tuple(folds)
    options, member = request_options.DEFAULT, members[0]
    if not holds_options and request.scope["query_string"]:
        query = _options_in_query(request)
        if len(members) > 1:
            member = _one_of(members, query.pop("scores", member))
        options = request_options.from_query(query)
    if check_room is not None:
        check_room(options)
    if kind == FORM:
        files, document = await _read_form(request)
        return Posted(kind, files, member, request_options.from_json(document), sum(map(len, files)))
    body = await read_body(request)
    if kind != JSON:
        return Posted(kind, body if kind == NPY else bytes(body), member, options, len(body))
    parsed = await unblocked(len(body), json_object, body, (*members, "options"), folds)
    options = request_options.from_json(parsed.get("options"))
    if member not in parsed:
        member = next((name for name in members if name in parsed), member)
    elif len(parsed) > 2 or (len(parsed) == 2 and "options" not in parsed):
        raise InvalidParameter(f"The body has {' and '.join(map(repr, members))}; give one of them.")
    return Posted(kind, parsed.get(member), member, options, len(body))


def _check_defaults(request: Request, members: tuple[str, ...]) -> None:
    """Refuse options in the query string beside a body that holds them; generated clients send the defaults.

    Raises
    ------
    InvalidParameter
        An option is not the default.
    """
    query = _options_in_query(request)
    if query.get("scores") == members[0]:
        del query["scores"]
    if request_options.from_query(query) != request_options.DEFAULT:
        raise InvalidParameter(
            "Options of a JSON or multipart body belong in its `options`, not in the query string."
        )


def _options_in_query(request: Request) -> dict[str, str]:
    """Return the query string without the name of the model, which has chosen who reads it."""
    query = dict(request.query_params)
    query.pop("model", None)
    return query


def _one_of(members: tuple[str, ...], name: str) -> str:
    if name not in members:
        raise InvalidParameter(f"scores is {name!r:.100}; it must be {' or '.join(members)}.")
    return name


async def unblocked(size: int, work: Callable[..., T], *arguments: Any) -> T:
    """Call `work` directly for up to `large_json.PIECE` bytes, in a thread for more."""
    if size <= large_json.PIECE:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


def header(request: Request, name: bytes) -> str:
    """Return a header by its name in lower case, or an empty string."""
    for key, value in request.scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return ""


def inputs_of(posted: Posted, limit: int) -> list[Input]:
    """Return the inputs of a body of `/predict` that is not `.npy`; large JSON bodies take a while.

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
        raise InvalidParameter("inputs must be a list of at least one object with `image` or `tensor`.")
    if len(sent) > limit:
        raise TooManySamples(f"The request holds {len(sent)} samples; the queue takes at most {limit}.")
    if posted.kind == FORM:
        return [Input("image", file) for file in sent]
    return [_input(item, f"inputs[{n}]") for n, item in enumerate(sent)]


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
        sent = _input(item, name)
        if sent.member != "tensor" or sent.member not in inputs.members:
            return sent
        try:
            return Input(sent.member, inputs.decode(sent.member, sent.value, 0))
        except BackboneError as error:
            raise InvalidInput(f"{name}: {error}") from error

    has_tensors = "tensor" in inputs.members
    return Fold(of_run, math.prod(inputs.shape) if has_tensors else large_json.MAX_VALUES)


def _input(item: Any, name: str) -> Input:
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
    raise InvalidParameter(
        f'{name} must be {{"image": "<base64>"}}, {{"tensor": [...]}}, {{"features": [...]}}, '
        f'{{"text": "..."}} or {{"tokens": {{...}}}}, got {reprlib.repr(item)}.'
    )


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


async def read_body(request: Request) -> bytes:
    """Receive a whole body.

    Raises
    ------
    MalformedBody
        It is empty.
    """
    chunks: list[bytes] = []
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        if chunk := message.get("body", b""):
            chunks.append(chunk)
        more = message.get("more_body", False)
    if len(chunks) == 1:
        whole = chunks[0]
    elif sum(map(len, chunks)) <= COPIED:
        whole = b"".join(chunks)
    else:
        whole = await asyncio.to_thread(b"".join, chunks)
    if not whole:
        raise MalformedBody("The body is empty.")
    return whole


def json_object(
    body: Body, members: tuple[str, ...], folds: Mapping[str, Fold] | None = None
) -> Mapping[str, Any]:
    """Parse a JSON object that has these members and no others.

    Raises
    ------
    MalformedBody, InvalidParameter
        It is not JSON; it is no object, or has other members.
    """
    try:
        document = large_json.parse(body, folds)
    except orjson.JSONDecodeError as error:
        document = _with_nan(body)
        if document is None:
            raise MalformedBody(f"The body is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise InvalidParameter(f"The body must be a JSON object with {' and '.join(map(repr, members))}.")
    for name in document:
        if name not in members:
            place = request_options.place_of(name)
            hint = f"; {name} belongs in `{place}`" if place else ""
            raise InvalidParameter(
                f"The body has a member {name!r:.100}{hint}; it may have {', '.join(members)}."
            )
    return document


def _with_nan(body: Body) -> Any:
    """Parse JSON that contains NaN or Infinity, so that the check of the values can name the place."""
    if len(body) > NAN_LIMIT:
        return None
    try:
        document = json.loads(body)
        json.dumps(document, ensure_ascii=False).encode()  # fails on text that is not Unicode
    except (ValueError, RecursionError):
        return None
    return document


async def _read_form(request: Request) -> tuple[list[bytes], Any]:
    """Return the `file` parts and the `options` document of a form."""
    files: list[bytes] = []
    options: list[Any] = []
    try:
        form = await request.form(max_fields=16)
    except MultiPartException as error:
        raise MalformedBody(f"The form cannot be parsed: {error.message}") from error
    try:
        for name, value in form.multi_items():
            if name == "file" and isinstance(value, UploadFile):
                files.append(await value.read())
            elif name == "options" and not options:
                text = await value.read() if isinstance(value, UploadFile) else value
                options.append(request_options.parse("options", text))
            else:
                raise InvalidParameter(
                    f"The form has an unexpected part {name!r:.100}; it takes `file` parts, sent as files, "
                    "and one `options` part."
                )
    finally:
        await form.close()
    if not files:
        raise InvalidParameter("The form has no `file` part.")
    if not all(files):
        raise BadRequest("A `file` part is empty.")
    return files, options[0] if options else None
