"""`/predict` and `/calibrate` and their part of the OpenAPI document; they translate, the pipeline works."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from boxcal.app.http.dependencies import DirectRequest, PlainRoute, model_of
from boxcal.app.http.problem_documents import problems
from boxcal.app.http.problems import (
    BackboneFailed,
    BodyTooLarge,
    CalibratorNotFound,
    DamagedArtifact,
    DeadlineExceeded,
    ForeignCalibrator,
    ImageTooLarge,
    InvalidBounds,
    InvalidInput,
    InvalidLogits,
    InvalidParameter,
    MalformedBody,
    NoModel,
    NotReady,
    QueueFull,
    RegistryUnavailable,
    RequestTooLarge,
    TooFewPredictions,
    TooManySamples,
    UnsupportedMediaType,
)
from boxcal.app.http.protocol import DISCONNECTION
from boxcal.app.observability.tracing import STAGES_KEY
from boxcal.app.predict.answers import CalibratedAnswer, Float64Array
from boxcal.app.predict.bodies import (
    CALIBRATE_TYPES,
    CSV,
    FORM,
    IMAGES,
    JSON,
    NPY,
    PREDICT_TYPES,
    SCORES,
    TEXT,
    header,
    read,
    unblocked,
)
from boxcal.app.predict.description import examples
from boxcal.app.predict.inputs import Inputs, inputs_of
from boxcal.app.predict.options import Options, timeout_of
from boxcal.app.predict.pipeline import Pipeline
from boxcal.app.schemas.predictions import Answer
from boxcal.app.tables.arrays import (
    as_logits,
    check_are_logits,
    check_scores,
    read_npy,
    read_rows,
    write_npy,
)
from boxcal.calibrators.scores import LOGITS

BINARY = {"type": "string", "format": "binary"}
INTEGER = {"type": "integer", "minimum": 0}


ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "model": Answer,
        "description": "The predictions; with `Accept: application/x-npy` the (N, K) probabilities, float64.",
        "content": {NPY: {"schema": BINARY}},
    }
}

QUERY_DESCRIPTIONS = {
    "options": "All options as one JSON document, instead of the other parameters.",
    "bounds": 'JSON object with `lower` and `upper`, such as `{"upper": 0.75}`.',
    "lower": 'JSON: the lower bounds, such as `{"8": 0.02}`.',
    "upper": "JSON: the upper bounds, such as `0.75`.",
    "top_k": "How many classes `top` lists.",
    "probabilities": "Whether each prediction carries all K probabilities.",
    "logits": "Whether each prediction carries the K logits.",
    "explain": "Whether each prediction carries its mapped logits and fitted bounds.",
    "feedback": "Whether each prediction gets an `id` for `POST /feedback`.",
    "prior_adjustment": "Whether to adjust to the class frequencies of recent predictions.",
    "calibrator": "`active`, or a version; 0 is `uncalibrated`.",
    "timeout_ms": "Timeout in milliseconds.",
}


OPTIONS = {"bounds": {"upper": 0.75, "lower": {"8": 0.02}}, "top_k": 2}
LOGITS_EXAMPLE = {
    "logits": [[9.1, 0.3, 0.2, 0.1, 0, 0, 0.4, 0.2, 6.5, 0.1]],
    "options": {"bounds": {"upper": 0.8}, "top_k": 1},
}


def options_schema() -> dict[str, Any]:
    """Return the schema of the options without references, so that it can be part of any body."""
    schema = Options.model_json_schema()
    schema["properties"]["bounds"] = {"anyOf": [schema.pop("$defs")["BoundsOption"], {"type": "null"}]}
    return schema


MODEL = {
    "name": "model",
    "in": "query",
    "required": False,
    "description": "Name of the model. Default: the first one.",
    "schema": {"type": "string"},
}


def query_parameters() -> list[dict[str, Any]]:
    """Describe the options of bodies that contain data alone."""
    properties = options_schema()["properties"]
    schemas = {
        name: properties[name]
        for name in (
            "top_k",
            "probabilities",
            "logits",
            "explain",
            "feedback",
            "prior_adjustment",
            "calibrator",
        )
    }
    schemas["timeout_ms"] = {"type": "number", "exclusiveMinimum": 0}
    return [
        {
            "name": name,
            "in": "query",
            "required": False,
            "description": description,
            **({"schema": schemas[name]} if name in schemas else {"content": {JSON: {"schema": {}}}}),
        }
        for name, description in QUERY_DESCRIPTIONS.items()
    ]


def predict_body() -> dict[str, Any]:
    """Describe `/predict`'s bodies and query string."""
    options = options_schema()
    image = {"type": "object", "required": ["image"], "additionalProperties": False}
    tensor = {"type": "object", "required": ["tensor"], "additionalProperties": False}
    item = {
        "anyOf": [
            {**image, "properties": {"image": {"type": "string", "format": "byte"}}},
            {**tensor, "properties": {"tensor": {"type": "array", "items": {}}}},
            _object_of("features", {"anyOf": [{"type": "array", "items": {}}, {"type": "object"}]}),
            _object_of("text", {"type": "string"}),
            _object_of(
                "tokens", {"type": "object", "additionalProperties": {"type": "array", "items": INTEGER}}
            ),
        ]
    }
    form = {
        "type": "object",
        "required": ["file"],
        "properties": {"file": {"type": "array", "items": BINARY, "minItems": 1}, "options": options},
    }
    return _body(
        {
            JSON: {
                "schema": _object("inputs", {"type": "array", "items": item, "minItems": 1}, options),
                "example": {"inputs": [{"image": examples("digits")[0].png}], "options": OPTIONS},
            },
            FORM: {"schema": form, "encoding": {"options": {"contentType": JSON}}},
            NPY: {"schema": BINARY},
            CSV: {"schema": {"type": "string"}},
            TEXT: {"schema": {"type": "string"}},
            **{kind: {"schema": BINARY} for kind in IMAGES},
        }
    )


def calibrate_body() -> dict[str, Any]:
    """Describe `/calibrate`'s bodies and query string."""
    row = {"type": "array", "items": {"type": "number"}, "minItems": 1}
    second = {"type": "number", "description": "The score of the second of two classes."}
    rows = {"type": "array", "items": {"anyOf": [row, second]}, "minItems": 1}
    either = {"anyOf": [_object(name, rows, options_schema()) for name in SCORES]}
    scores = {
        "name": "scores",
        "in": "query",
        "required": False,
        "description": "What an array in the body holds.",
        "schema": {"type": "string", "enum": list(SCORES), "default": LOGITS},
    }
    body = _body({JSON: {"schema": either, "example": LOGITS_EXAMPLE}, NPY: {"schema": BINARY}})
    return {**body, "parameters": [scores, *body["parameters"]]}


def _object_of(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": [name], "additionalProperties": False, "properties": {name: schema}}


def _object(name: str, schema: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": [name],
        "additionalProperties": False,
        "properties": {name: schema, "options": {"anyOf": [options, {"type": "null"}]}},
    }


def _body(content: dict[str, Any]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": content}, "parameters": [MODEL, *query_parameters()]}


T = TypeVar("T")

DOUBLE = np.dtype(np.float64)
COMMON = (
    MalformedBody,
    BodyTooLarge,
    RequestTooLarge,
    UnsupportedMediaType,
    InvalidParameter,
    InvalidBounds,
    CalibratorNotFound,
    ForeignCalibrator,
    DamagedArtifact,
    QueueFull,
    NotReady,
    DeadlineExceeded,
    TooFewPredictions,
    RegistryUnavailable,
)


async def predict(request: DirectRequest) -> None:
    """Classify images, tensors, rows of features or texts, inside the bounds that the request sets."""
    pipeline = model_of(request).pipeline
    posted = await read(request, PREDICT_TYPES, ("inputs",), pipeline.check_room)
    if posted.kind == NPY:
        inputs: Inputs = np.atleast_1d(read_npy(posted.content))
    else:
        size = posted.size if posted.kind in {JSON, CSV} else 0
        inputs = await unblocked(size, inputs_of, posted, pipeline.batcher.max_queue_samples, pipeline.inputs)
    as_npy = accepts_npy(request, posted.options)
    with pipeline.memory_for(len(inputs), posted.options, as_json=not as_npy), timeout_of(posted.options):
        answer = await unless_disconnected(request, pipeline.predict(inputs, posted.options))
        await respond(request, pipeline, answer, as_npy=as_npy)


async def calibrate(request: DirectRequest) -> None:
    """Calibrate logits or probabilities of a model that runs elsewhere, inside the bounds given."""
    pipeline = model_of(request).pipeline
    num_classes = len(pipeline.labels)
    posted = await read(request, CALIBRATE_TYPES, SCORES)
    content = read_npy(posted.content) if posted.kind == NPY else posted.content
    rows = len(content) if isinstance(content, list) or getattr(content, "ndim", 0) in {1, 2} else 0
    is_declared = bool(request.scope["query_string"]) and "scores" in request.query_params

    def logits(check_finite: bool) -> Float64Array:
        check_finite |= posted.member != LOGITS
        if posted.kind == NPY:
            scores = check_scores(content, num_classes, posted.member, check_finite=check_finite)
            dtype = content.dtype
        else:
            scores = read_rows(content, num_classes, posted.member, check_finite=check_finite)
            dtype = DOUBLE
        if posted.member == LOGITS and not is_declared:
            check_are_logits(scores)
        return as_logits(scores, posted.member, dtype)

    as_npy = accepts_npy(request, posted.options)
    with pipeline.memory_for(rows, posted.options, as_json=not as_npy), timeout_of(posted.options):
        numbers = max(rows * num_classes, posted.size // 8)
        answer = await pipeline.calibrate(logits, numbers, posted.options, is_array=posted.kind == NPY)
        await respond(request, pipeline, answer, as_npy=as_npy)


routes = (
    PlainRoute(
        "/predict",
        predict,
        tags=["predict"],
        response_class=Response,
        openapi_extra=predict_body(),
        responses={
            **ANSWER,
            **problems(*COMMON, NoModel, InvalidInput, ImageTooLarge, TooManySamples, BackboneFailed),
        },
    ),
    PlainRoute(
        "/calibrate",
        calibrate,
        tags=["predict"],
        response_class=Response,
        openapi_extra=calibrate_body(),
        responses={**ANSWER, **problems(*COMMON, InvalidLogits)},
    ),
)


def accepts_npy(request: Request, options: Options) -> bool:
    """Whether the client asked for `.npy`."""
    as_npy = NPY in header(request, b"accept")
    if as_npy and options.feedback:
        raise InvalidParameter(
            "feedback is true, and the response is to be .npy, which has no place for ids."
        )
    return as_npy


async def respond(
    request: DirectRequest, pipeline: Pipeline, answer: CalibratedAnswer, *, as_npy: bool
) -> None:
    """Send the response in the form that the client accepts."""
    if (report := request.scope.get(STAGES_KEY)) is not None:  # the request is traced
        report(answer.seconds)
    if not as_npy:
        await request.reply(JSON, await pipeline.write(answer, CalibratedAnswer.to_json))
        return
    content = await pipeline.write(answer, lambda a: write_npy(a.rows.probabilities))
    headers = {
        b"boxcal-calibrator-version": str(answer.served.version),
        b"boxcal-calibrator-method": answer.served.method,
        b"boxcal-bounds-relaxed": str(bool(answer.rows.relaxed.any())).lower(),
    }
    await request.reply(NPY, content, [(name, value.encode()) for name, value in headers.items()])


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Wait for work, and cancel it if the client disconnects, which frees its room in the queue."""
    task = asyncio.current_task()
    gone = False

    def cancel() -> None:
        nonlocal gone
        gone = True
        if task is not None:
            task.cancel()

    async def receive() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        cancel()

    watch = request.scope.get("extensions", {}).get(DISCONNECTION, {}).get("watch")
    watcher = asyncio.create_task(receive()) if watch is None else None
    if watch is not None:
        watch(cancel)
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task is not None and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        if watcher is None:
            watch(None)
        else:
            watcher.cancel()
