"""The one error tree of the service, and the one handler that renders it: the way out of a refused request.

    BoxcalError                     500  something the service could not do
      + BadRequest                  400  the bytes of the request could not be read
      |   - MalformedBody           400  not JSON, not a multipart form, not the array the header promises
      + NotFound                    404
      |   - RouteNotFound           404  no such path
      + MethodNotAllowed            405
      + PayloadTooLarge             413
      |   - BodyTooLarge            413  more bytes than the limit
      |   - ImageTooLarge         413  more pixels than the limit, found before any was decoded
      |   - TooManySamples          413  more samples in one request than the queue can ever hold
      + UnsupportedMediaType        415  a content type this route does not read
      + InvalidRequest              422  readable, but not acceptable; the detail names the value
      |   - InvalidParameter        422  an option or field of the wrong kind or out of range
      |   - InvalidBounds           422  bounds that no probability vector obeys
      |   - InvalidLogits           422  logits of the wrong shape, or not finite
      |   - InvalidInput            422  an image that does not decode, or a tensor that does not fit
      + Unavailable                 503  come back later; carries Retry-After
      |   - NotReady                503  weights are still being loaded or warmed
      |   - QueueFull               503  the batcher holds as many samples as it may
      + DeadlineExceeded            504  `timeout_ms` passed before the work was done
      - InternalError               500  a defect; the log has the traceback

Errors of other rooms are leaves too: a leaf belongs where its cause is, and joins the tree by its base class.
"""

from __future__ import annotations

import http
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

PROBLEM_MEDIA_TYPE = "application/problem+json"
PROBLEM_SCHEMA: dict[str, Any] = {
    "title": "Problem",
    "description": "Why a request was refused (RFC 9457). `error` repeats `detail`.",
    "type": "object",
    "required": ["type", "title", "status", "detail", "error"],
    "properties": {
        "type": {"type": "string", "description": "Names the kind of problem."},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What exactly was wrong: the class, the sum, the value."},
        "error": {"type": "string", "description": "The same as `detail`."},
    },
}

CLIENT_CLOSED = 499
"""Status that is counted, but reaches nobody: the client left before its answer."""


class BoxcalError(Exception):
    """Root of every error the service answers with.

    Parameters
    ----------
    detail
        One sentence that says exactly what was wrong and quotes the offending value.
    headers
        Further response headers.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal-error"
    title: ClassVar[str] = "The service failed"

    def __init__(self, detail: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.headers = dict(headers or {})


class InternalError(BoxcalError):
    """A defect of the service."""


class BadRequest(BoxcalError):
    """The bytes of the request could not be read."""

    status = 400
    type = "bad-request"
    title = "The request could not be read"


class MalformedBody(BadRequest):
    """The body is not what its content type promises."""

    type = "malformed-body"
    title = "The body could not be read"


class NotFound(BoxcalError):
    """What the request names does not exist."""

    status = 404
    type = "not-found"
    title = "Not found"


class RouteNotFound(NotFound):
    """No route has this path."""

    type = "route-not-found"
    title = "No such path"


class MethodNotAllowed(BoxcalError):
    """The path exists, but not with this method."""

    status = 405
    type = "method-not-allowed"
    title = "The path does not take this method"


class PayloadTooLarge(BoxcalError):
    """The request is larger than a limit."""

    status = 413
    type = "payload-too-large"
    title = "The request is too large"


class BodyTooLarge(PayloadTooLarge):
    """The body has more bytes than the limit."""

    type = "body-too-large"
    title = "The body is too large"


class ImageTooLarge(PayloadTooLarge):
    """An image has more pixels than the limit; it was not decoded."""

    type = "image-too-large"
    title = "The image is too large"


class TooManySamples(PayloadTooLarge):
    """One request holds more samples than the queue can ever take."""

    type = "too-many-samples"
    title = "The request holds too many samples"


class UnsupportedMediaType(BoxcalError):
    """The route does not read bodies of this content type."""

    status = 415
    type = "unsupported-media-type"
    title = "The content type is not supported"


class InvalidRequest(BoxcalError):
    """The request could be read, but its content is not acceptable."""

    status = 422
    type = "invalid-request"
    title = "The request is not valid"


class InvalidParameter(InvalidRequest):
    """An option or field is of the wrong kind or out of range."""

    type = "invalid-parameter"
    title = "A parameter is not valid"


class InvalidBounds(InvalidRequest):
    """No probability vector obeys the bounds."""

    type = "invalid-bounds"
    title = "The bounds cannot be met"


class InvalidLogits(InvalidRequest):
    """The logits have the wrong shape, or are not finite."""

    type = "invalid-logits"
    title = "The logits are not valid"


class InvalidInput(InvalidRequest):
    """An image that does not decode, or a tensor that does not fit the backbone."""

    type = "invalid-input"
    title = "An input is not valid"


class Unavailable(BoxcalError):
    """The service cannot take the request now; `Retry-After` says when to come back."""

    status = 503
    type = "unavailable"
    title = "The service is not available"

    def __init__(self, detail: str, *, retry_after: int = 1) -> None:
        super().__init__(detail, headers={"Retry-After": str(retry_after)})


class NotReady(Unavailable):
    """The weights are still being loaded or warmed, or the service is going down."""

    type = "not-ready"
    title = "The service is not ready"


class QueueFull(Unavailable):
    """The batcher already holds as many samples as it may."""

    type = "queue-full"
    title = "The queue is full"


class DeadlineExceeded(BoxcalError):
    """The request's `timeout_ms` passed before its work was done."""

    status = 504
    type = "deadline-exceeded"
    title = "The deadline passed"


BY_STATUS: dict[int, type[BoxcalError]] = {
    leaf.status: leaf
    for leaf in (
        MalformedBody,
        RouteNotFound,
        MethodNotAllowed,
        BodyTooLarge,
        UnsupportedMediaType,
        Unavailable,
    )
}


def problems(*leaves: type[BoxcalError]) -> dict[int | str, dict[str, Any]]:
    """Declare in `responses=` of a route: these errors, and the ones that any route may answer with.

    Leaves that share a status are described together.
    """
    titles: dict[int, list[str]] = {}
    declared: tuple[type[BoxcalError], ...] = (*leaves, InternalError)
    for leaf in declared:
        known = titles.setdefault(leaf.status, [])
        if leaf.title not in known:
            known.append(leaf.title)
    return {
        status: {
            "description": "; ".join(titles[status]),
            "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
        }
        for status in sorted(titles)
    }


@dataclass(frozen=True, slots=True)
class Problem:
    """One RFC 9457 document, before it is written.

    Attributes
    ----------
    kind
        The last part of its `type`.
    """

    status: int
    kind: str
    title: str
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: Exception) -> Problem:
        """Describe any error that leaves a route."""
        if isinstance(error, BoxcalError):
            return cls(error.status, error.type, error.title, error.detail, error.headers)
        if isinstance(error, RequestValidationError):
            return cls.of(InvalidParameter(describe_validation(error.errors())))
        if isinstance(error, HTTPException):
            known = BY_STATUS.get(error.status_code)
            phrase = http.HTTPStatus(error.status_code).phrase
            kind, title = (known.type, known.title) if known else (phrase.lower().replace(" ", "-"), phrase)
            return cls(error.status_code, kind, title, str(error.detail), error.headers or {})
        return cls.of(InternalError("An unexpected error; the log says which."))

    def response(self) -> Response:
        """Write it."""
        # A detail quotes what was sent, and that may hold half a surrogate pair, which UTF-8 cannot carry.
        detail = self.detail.encode("utf-8", "backslashreplace").decode()
        document = {
            "type": f"urn:boxcal:problem:{self.kind}",
            "title": self.title,
            "status": self.status,
            "detail": detail,
            "error": detail,
        }
        return Response(
            orjson.dumps(document), self.status, headers=dict(self.headers), media_type=PROBLEM_MEDIA_TYPE
        )


def describe_validation(errors: Sequence[Any], *prefix: str) -> str:
    """Name the first of pydantic's errors and quote the value that was sent."""
    first = errors[0]
    place = ".".join((*prefix, *(str(part) for part in first["loc"])))
    message = f"{place}: {first['msg']}"
    if first["type"] != "missing" and isinstance(first.get("input"), str | int | float | bool | None):
        message += f", got {first['input']!r:.200}"
    more = len(errors) - 1
    return message + (f" (and {more} more)" if more else "") + "."


def install(app: FastAPI, count: Callable[[str], None]) -> None:
    """Let the one handler answer every error of `app`, FastAPI's own included.

    Parameters
    ----------
    app
        The application.
    count
        Told the kind of every problem that is answered.
    """

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == http.HTTPStatus.NOT_FOUND:
            error = RouteNotFound(f"There is nothing at {request.url.path}; /docs lists what there is.")
        elif isinstance(error, HTTPException) and error.status_code == http.HTTPStatus.METHOD_NOT_ALLOWED:
            detail = f"{request.url.path} does not take {request.method}."
            error = MethodNotAllowed(detail, headers=error.headers)
        return answer(error, count)

    for kind in (BoxcalError, RequestValidationError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, handle)


def answer(error: Exception, count: Callable[[str], None]) -> Response:
    """Turn an error that leaves a route into its answer, and count it."""
    if isinstance(error, ClientDisconnect):
        count("disconnected")
        return Response(status_code=CLIENT_CLOSED)
    problem = Problem.of(error)
    count(problem.kind)
    return problem.response()
