"""From the bytes of a request to inputs and options: one reader for each kind of body in the contract."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request

from boxcal.app.errors import BadRequest, InvalidParameter, MalformedBody, UnsupportedMediaType
from boxcal.app.predict import options as request_options
from boxcal.app.predict.arrays import read_npy
from boxcal.app.predict.inputs import Base64Image, EncodedImage, Input, NestedTensor
from boxcal.app.predict.options import Options

IMAGES = ("image/jpeg", "image/png", "image/webp")
JSON = "application/json"
FORM = "multipart/form-data"
NPY = "application/x-npy"
NOT_A_NUMBER_LIMIT = 2**20
"""Up to so many bytes are read again to tell which number is NaN; larger bodies are just called malformed."""


@dataclass(frozen=True, slots=True, eq=False)
class Posted:
    """What a client posted to `/predict`: inputs, or an array of samples, and options."""

    inputs: list[Input] | NDArray[np.generic]
    options: Options


async def read_predict(request: Request, check_room: Callable[[Options], None]) -> Posted:
    """Read a body of `/predict`.

    Parameters
    ----------
    check_room
        Called before a byte of the body is read; raises where that would be in vain. It is given the options
        as far as they are known by then: those of the query string.

    Raises
    ------
    UnsupportedMediaType, MalformedBody, InvalidParameter
        What is wrong with it.
    """
    kind = media_type(request)
    if kind in IMAGES:
        options = request_options.from_query(request.query_params)
        check_room(options)
        return Posted([EncodedImage(await body_of(request))], options)
    if kind == JSON:
        refuse_query(request)
        check_room(request_options.DEFAULT)
        document = object_of(await body_of(request), ("inputs", "options"))
        return Posted(_inputs(document.get("inputs")), request_options.from_json(document.get("options")))
    if kind == FORM:
        refuse_query(request)
        check_room(request_options.DEFAULT)
        return await _read_form(request)
    if kind == NPY:
        options = request_options.from_query(request.query_params)
        check_room(options)
        return Posted(read_npy(await body_of(request)), options)
    raise unsupported(kind, (*IMAGES, FORM, JSON, NPY))


def header(request: Request, name: bytes) -> str:
    """Give a header by its name in lower case, or nothing, without a mapping of them all."""
    for key, value in request.scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return ""


def media_type(request: Request) -> str:
    """Give the content type without its parameters."""
    return header(request, b"content-type").partition(";")[0].strip().lower()


def unsupported(kind: str, known: tuple[str, ...]) -> UnsupportedMediaType:
    """Say which content types a route reads."""
    sent = f"{kind!r:.100}" if kind else "missing"
    return UnsupportedMediaType(f"The content type is {sent}; this route reads {', '.join(known)}.")


async def body_of(request: Request) -> bytes:
    """Read the body, which must not be empty.

    Raises
    ------
    MalformedBody, ClientDisconnect
        It is empty; the client left before its end.
    """
    chunks: list[bytes] = []
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if not body:
        raise MalformedBody("The body is empty.")
    return body


def refuse_query(request: Request) -> None:
    """Refuse a query string where the options belong into the body, rather than ignore it."""
    if request.scope["query_string"]:
        raise InvalidParameter(
            "Options of a JSON or multipart body belong into its `options`, not into the query string."
        )


def object_of(body: bytes, members: tuple[str, ...]) -> Mapping[str, Any]:
    """Parse a JSON object that has these members and no others.

    Raises
    ------
    MalformedBody, InvalidParameter
        It is not JSON; it is no object, or has other members.
    """
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        document = _with_not_a_numbers(body)
        if document is None:
            raise MalformedBody(f"The body is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise InvalidParameter(f"The body must be a JSON object with {' and '.join(map(repr, members))}.")
    for name in document:
        if name not in members:
            raise InvalidParameter(f"The body has a member {name!r:.100}; it may have {', '.join(members)}.")
    return document


def _with_not_a_numbers(body: bytes) -> Any:
    """Parse what is JSON but for NaN and Infinity, so that the check of the values can name the place."""
    if len(body) > NOT_A_NUMBER_LIMIT:
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _inputs(sent: Any) -> list[Input]:
    if not isinstance(sent, list) or not sent:
        raise InvalidParameter("inputs must be a list of at least one object with `image` or `tensor`.")
    return [_input(item, f"inputs[{position}]") for position, item in enumerate(sent)]


def _input(item: Any, name: str) -> Input:
    if isinstance(item, dict) and len(item) == 1:
        if isinstance(text := item.get("image"), str):
            return Base64Image(text)
        if isinstance(values := item.get("tensor"), list):
            return NestedTensor(values)
    raise InvalidParameter(
        f'{name} must be {{"image": "<base64>"}} or {{"tensor": [...]}}, got {reprlib.repr(item)}.'
    )


async def _read_form(request: Request) -> Posted:
    inputs: list[Input] = []
    options: Options | None = None
    try:
        form = await request.form(max_fields=16)
    except MultiPartException as error:
        raise MalformedBody(f"The form cannot be read: {error.message}") from error
    try:
        for name, value in form.multi_items():
            if name == "file" and isinstance(value, UploadFile):
                inputs.append(EncodedImage(await value.read()))
            elif name == "options" and options is None:
                text = await value.read() if isinstance(value, UploadFile) else value
                options = request_options.from_json(request_options.parse("options", text))
            else:
                raise InvalidParameter(
                    f"The form has an unexpected part {name!r:.100}; it takes `file` parts, sent as files, "
                    "and one `options` part."
                )
    finally:
        await form.close()
    if not inputs:
        raise InvalidParameter("The form has no `file` part.")
    if any(isinstance(sent, EncodedImage) and not sent.data for sent in inputs):
        raise BadRequest("A `file` part is empty.")
    return Posted(inputs, options or request_options.DEFAULT)
