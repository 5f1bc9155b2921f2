"""The HTTP side of the predict path: `/predict` and `/calibrate`; they translate, the pipeline works."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from boxcal.app.errors import (
    BodyTooLarge,
    DeadlineExceeded,
    ImageTooLarge,
    InvalidBounds,
    InvalidInput,
    InvalidLogits,
    InvalidParameter,
    MalformedBody,
    QueueFull,
    TooManySamples,
    UnsupportedMediaType,
    problems,
)
from boxcal.app.predict import options as request_options
from boxcal.app.predict import schemas
from boxcal.app.predict.answers import Answer
from boxcal.app.predict.arrays import check_logits, read_npy, read_rows, write_npy
from boxcal.app.predict.bodies import (
    JSON,
    NPY,
    body_of,
    header,
    media_type,
    object_of,
    read_predict,
    refuse_query,
    unsupported,
)
from boxcal.app.predict.pipeline import Pipeline
from boxcal.app.registry.errors import CalibratorNotFound, DamagedArtifact, ForeignCalibrator
from boxcal.app.state import State

T = TypeVar("T")

COMMON = (
    MalformedBody,
    BodyTooLarge,
    UnsupportedMediaType,
    InvalidParameter,
    InvalidBounds,
    CalibratorNotFound,
    ForeignCalibrator,
    DamagedArtifact,
)


class DirectRoute(APIRoute):
    """A route whose endpoint reads the request itself.

    It stands in the OpenAPI document as any other, but FastAPI's parsing and dependencies, which would cost
    as much as the work of a small request, are not run for it.
    """

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # type: ignore[override]
        """Let the endpoint answer."""
        return cast("Callable[[Request], Awaitable[Response]]", self.endpoint)


class Written(Response):
    """A JSON document that is bytes already: none of what other answers need to be looked through."""

    def __init__(self, body: bytes) -> None:
        self.status_code = 200
        self.background = None
        self.body = body
        self.raw_headers = [(b"content-length", b"%d" % len(body)), (b"content-type", JSON.encode())]


router = APIRouter(tags=["predict"], route_class=DirectRoute)


@router.post(
    "/predict",
    response_class=Response,
    openapi_extra=schemas.predict_body(),
    responses={
        **schemas.ANSWER,
        **problems(*COMMON, InvalidInput, ImageTooLarge, TooManySamples, QueueFull, DeadlineExceeded),
    },
)
async def predict(request: Request) -> Response:
    """Classify images or tensors with calibrated probabilities, inside the bounds that the request sets."""
    pipeline = pipeline_of(request)
    posted = await read_predict(request, pipeline.check_room)
    answer = await unless_disconnected(request, pipeline.predict(posted.inputs, posted.options))
    return await respond(request, pipeline, answer)


@router.post(
    "/calibrate",
    response_class=Response,
    openapi_extra=schemas.calibrate_body(),
    responses={**schemas.ANSWER, **problems(*COMMON, InvalidLogits, QueueFull, DeadlineExceeded)},
)
async def calibrate(request: Request) -> Response:
    """Turn logits of a model that runs elsewhere into calibrated probabilities, inside the bounds given."""
    pipeline = pipeline_of(request)
    num_classes = len(pipeline.labels)
    kind = media_type(request)
    if kind == JSON:
        refuse_query(request)
        body = await body_of(request)
        document = object_of(body, ("logits", "options"))
        options = request_options.from_json(document.get("options"))
        rows = document.get("logits")
        answer = await pipeline.calibrate(lambda: read_rows(rows, num_classes), len(body) // 8, options)
    elif kind == NPY:
        options = request_options.from_query(request.query_params)
        values = read_npy(await body_of(request))
        answer = await pipeline.calibrate(lambda: check_logits(values, num_classes), values.size, options)
    else:
        raise unsupported(kind, (JSON, NPY))
    return await respond(request, pipeline, answer)


ENDPOINTS = {"/predict": predict, "/calibrate": calibrate}
"""What the service answers without a search for the route."""


def pipeline_of(request: Request) -> Pipeline:
    """Give the pipeline of the service that answers this request."""
    state: State = request.scope["state"]["boxcal"]
    return state.pipeline


async def respond(request: Request, pipeline: Pipeline, answer: Answer) -> Response:
    """Write an answer in the form that the client accepts."""
    if NPY in header(request, b"accept"):
        headers = {
            "Boxcal-Calibrator-Version": str(answer.served.version),
            "Boxcal-Calibrator-Method": answer.served.method,
            "Boxcal-Bounds-Relaxed": str(bool(answer.rows.relaxed.any())).lower(),
        }
        content = await pipeline.write(answer, lambda a: write_npy(a.rows.probabilities))
        return Response(content, media_type=NPY, headers=headers)
    return Written(await pipeline.write(answer, Answer.to_json))


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Wait for work, but stop it where the client leaves, so that its place in the queue is free.

    Raises
    ------
    ClientDisconnect
        The client left.
    """
    task = asyncio.current_task()
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        if task is not None:
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task is not None and not task.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
