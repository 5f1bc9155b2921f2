"""The documents of inference requests and responses: JSON, and binary data of tensors behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import orjson

from boxcal.app.http.problems import BodyTooLarge, InvalidInput, InvalidParameter, MalformedBody
from boxcal.app.predict.bodies import QUICK_BYTES, parse_json
from boxcal.app.protocols.v2.inference import (
    Answered,
    InferenceRequest,
    check_input_parameters,
    class_count,
)
from boxcal.app.protocols.v2.tensors import datatype_of, from_binary, from_json, read_shape, view_of
from boxcal.app.settings import limits

MAX_TENSORS = 1000
BINARY_TENSORS = "binary tensors (`binary_data_size`)"
REPEATED = 4096
"""Bytes of JSON before binary data that are remembered with their meaning."""


def parsed_size(body: bytes | memoryview, length: str) -> int:
    """Return how many bytes of a request are parsed, and not only viewed as numbers."""
    head = len(body) if isinstance(body, bytes) else int(length)
    return len(body) if head > QUICK_BYTES or b"BYTES" in bytes(body[:head]) else head


@dataclass(frozen=True, slots=True)
class SentTensor:
    """How a request describes one input."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    size: int | None  # Bytes of its binary data; None where `data` holds it
    data: Any


@dataclass(frozen=True, slots=True)
class JsonPart:
    """The JSON part of a request."""

    inputs: tuple[SentTensor, ...]
    # Names of the outputs that are asked for, with the number of classes of each
    outputs: tuple[tuple[str, int], ...]
    binary: Mapping[str, bool]  # Which of them are wanted as binary data
    binary_default: bool  # Whether outputs are that are not asked for by name
    parameters: Mapping[str, Any]
    id: str | float | None  # Given back in the response, a string or a number; None without one

    def is_binary(self, name: str) -> bool:
        """Whether an output is wanted as binary data."""
        return self.binary.get(name, self.binary_default)


def all_binary(answered: Answered, head: JsonPart) -> bool:
    """Whether a response is copied as it is: every output is of numbers and wanted as binary data."""
    return all(array.dtype.kind != "O" and head.is_binary(name) for name, array in answered.outputs)


def read_request(
    body: bytes | memoryview, length: str, model: str, version: str
) -> tuple[InferenceRequest, JsonPart]:
    """Read a request and its tensors.

    `length`: the header `Inference-Header-Content-Length`: bytes of the JSON part; empty without binary data.
    """
    if length and not (length.isascii() and length.isdecimal() and int(length[:12]) <= len(body)):
        raise MalformedBody(
            f"Inference-Header-Content-Length is {length!r:.50}; the body has {len(body)} bytes."
        )
    position = int(length) if length else len(body)
    if position > limits.MAX_JSON_BYTES:
        most = f"{limits.MAX_JSON_BYTES:,}"
        raise BodyTooLarge(f"The JSON part has at most {most} bytes; send more as {BINARY_TENSORS}.")
    # Clients that send binary data repeat the same JSON.
    is_known = length and position <= REPEATED
    head = (
        repeated_head(bytes(body[:position]))
        if is_known
        else read_head(body if isinstance(body, bytes) and not length else bytes(body[:position]))
    )
    rest, inputs = memoryview(body), {}
    for sent in head.inputs:
        if sent.name in inputs:
            raise InvalidInput(f"The request has two inputs {sent.name!r:.100}.")
        if sent.size is None:
            inputs[sent.name] = from_json(sent.name, sent.datatype, sent.shape, sent.data)
            continue
        end = position + sent.size
        if end > len(body):
            raise MalformedBody(
                f"The input {sent.name!r:.100} announces {sent.size!r:.50} bytes of binary data; "
                f"{len(body) - position} follow."
            )
        inputs[sent.name] = from_binary(sent.name, sent.datatype, sent.shape, rest[position:end])
        position = end
    if position != len(body):
        raise MalformedBody(f"{len(body) - position} bytes follow the last input.")
    return InferenceRequest(model, version, inputs, head.outputs, head.parameters), head


def read_head(text: bytes) -> JsonPart:
    """Read the JSON part of a request."""
    try:
        document = parse_json(text)
    except ValueError as error:
        raise MalformedBody(f"The request is not JSON: {error}.") from error
    if not isinstance(document, dict) or not isinstance(document.get("inputs"), list):
        raise InvalidParameter("The request must be a JSON object with a list `inputs`.")
    parameters, outputs = _parameters(document), document.get("outputs") or []
    if not isinstance(outputs, list):
        raise InvalidParameter(f"`outputs` must be a list, got {outputs!r:.100}.")
    if len(document["inputs"]) > MAX_TENSORS or len(outputs) > MAX_TENSORS:
        raise InvalidParameter(f"A request has at most {MAX_TENSORS} inputs and outputs.")
    given = document.get("id")
    is_written = type(given) in (str, float) or (type(given) is int and given.bit_length() < 64)
    return JsonPart(
        tuple(map(_tensor, document["inputs"])),
        tuple(map(_wanted, outputs)),
        {entry["name"]: bool(_parameters(entry).get("binary_data")) for entry in outputs},
        bool(parameters.get("binary_data_output")),
        parameters,
        given if is_written else None,
    )


@lru_cache(maxsize=128)
def repeated_head(text: bytes) -> JsonPart:
    """Read a JSON part that the next request may have too; nobody changes it."""
    return read_head(text)


def write_response(answered: Answered, head: JsonPart) -> tuple[list[bytes | memoryview], int]:
    """Write a response in pieces; the second value is the length of its JSON part, 0 if all of it is JSON."""
    described: list[dict[str, Any]] = []
    pieces: list[bytes | memoryview] = []
    for name, array in answered.outputs:
        entry: dict[str, Any] = {"name": name, "datatype": datatype_of(array), "shape": list(array.shape)}
        if head.is_binary(name):
            pieces.append(view_of(array))
            entry["parameters"] = {"binary_data_size": len(pieces[-1])}
        else:
            flat = array.ravel()
            entry["data"] = flat.tolist() if array.dtype.kind == "O" else np.ascontiguousarray(flat)
        described.append(entry)
    response: dict[str, Any] = {
        "model_name": answered.model,
        "model_version": answered.version,
        "parameters": {"bounds_relaxed": answered.relaxed},
        "outputs": described,
    }
    if head.id is not None:
        response["id"] = head.id
    text = orjson.dumps(response, option=orjson.OPT_SERIALIZE_NUMPY)
    return [text, *pieces], len(text) if pieces else 0


def _tensor(entry: Any) -> SentTensor:
    """Read the description of one input."""
    if not isinstance(entry, dict) or not isinstance(name := entry.get("name"), str):
        raise InvalidInput("Each input must be an object with `name`, `shape` and `datatype`.")
    shape, datatype = read_shape(name, entry.get("shape")), entry.get("datatype")
    if not isinstance(datatype, str):
        raise InvalidInput(f"The input {name!r:.100} has no datatype.")
    parameters = _parameters(entry)
    check_input_parameters(name, parameters)
    size = parameters.get("binary_data_size")
    if size is None and "data" not in entry:
        raise InvalidInput(f"The input {name!r:.100} has neither `data` nor `binary_data_size`.")
    if size is not None and entry.get("data") is not None:
        raise InvalidInput(f"The input {name!r:.100} has `data` and `binary_data_size`; give one of them.")
    if size is not None and (type(size) is not int or size < 0):
        raise MalformedBody(f"The input {name!r:.100} announces {size!r:.50} bytes of binary data.")
    return SentTensor(name, datatype, shape, size, entry.get("data"))


def _wanted(entry: Any) -> tuple[str, int]:
    if not isinstance(entry, dict) or not isinstance(name := entry.get("name"), str):
        raise InvalidParameter("Each output must be an object with `name`.")
    return name, class_count(_parameters(entry).get("classification", 0))


def _parameters(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of a request, an input or an output."""
    parameters = entry.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidParameter(f"`parameters` must be an object, got {parameters!r:.100}.")
    return parameters
