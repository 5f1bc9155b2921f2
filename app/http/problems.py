"""The error tree of the service, and the problem documents that describe its errors.

    BoxcalError                     500  base class
      + BadRequest                  400  the request cannot be parsed
      |   - MalformedBody           400  invalid JSON, multipart form or `.npy` array
      + NotFound                    404
      |   - RouteNotFound           404  no route has this path
      |   - ModelNotFound           404  no model has this name
      |   - NoModel                 404  the service has no model, and calibrates only
      + MethodNotAllowed            405
      + PayloadTooLarge             413
      |   - BodyTooLarge            413  more bytes than the limit
      |   - ImageTooLarge           413  more pixels than the limit; checked before decoding
      |   - TooManySamples          413  more samples in one request than the queue can hold
      |   - RequestTooLarge         413  the logits and the response would take too much memory
      + UnsupportedMediaType        415  the route does not accept this content type
      + InvalidRequest              422  parsed, but not valid; the detail quotes the value
      |   - InvalidParameter        422  an option or field of the wrong type or out of range
      |   - InvalidBounds           422  no probability vector satisfies the bounds
      |   - InvalidLogits           422  logits of the wrong shape, or not finite
      |   - InvalidInput            422  an image that cannot be decoded, or a tensor of the wrong shape
      + Unavailable                 503  temporary; the response has a `Retry-After` header
      |   - NotReady                503  the service is starting or stopping
      |   - QueueFull               503  the queue holds its maximum number of samples
      + DeadlineExceeded            504  `timeout_ms` passed before the request was done
      + InternalError               500  a defect; the server log has the traceback
          - BackboneFailed          500  the backbone failed, or its logits are not finite

Other packages of `app` define further leaves next to the code that raises them.
"""

from __future__ import annotations

import http
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

PROBLEM_MEDIA_TYPE = "application/problem+json"


def media_type(path: str) -> str:
    """Return the media type of an error: clients of the Open Inference Protocol read errors as plain JSON."""
    return "application/json" if f"{path}/".startswith("/v2/") else PROBLEM_MEDIA_TYPE


PROBLEM_SCHEMA: dict[str, Any] = {
    "title": "Problem",
    "description": "Problem details of a failed request (RFC 9457). `error` has the same text as `detail`.",
    "type": "object",
    "required": ["type", "title", "status", "detail", "error", "request_id"],
    "properties": {
        "type": {"type": "string", "description": "Identifies the kind of problem."},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {
            "type": "string",
            "description": "What was wrong, with the offending value and the limit.",
        },
        "error": {"type": "string", "description": "The same as `detail`."},
        "request_id": {"type": "string", "description": "The same as the header `X-Request-Id`."},
    },
}

CLIENT_CLOSED = 499
"""Status recorded in the metrics when the client disconnected before its response."""


class BoxcalError(Exception):
    """Base class of every error that the service returns.

    Parameters
    ----------
    detail
        One sentence that says what was wrong and quotes the offending value.
    headers
        Additional response headers.
    """

    status: ClassVar[int] = 500
    type: ClassVar[str] = "internal-error"
    title: ClassVar[str] = "Internal error"

    def __init__(self, detail: str, *, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.headers = dict(headers or {})


class InternalError(BoxcalError):
    """Internal error; see the server log."""


class BackboneFailed(InternalError):
    """The backbone failed on an input, or returned logits that cannot be calibrated."""

    type = "backbone-failed"
    title = "The backbone failed"


class BadRequest(BoxcalError):
    """The request cannot be parsed."""

    status = 400
    type = "bad-request"
    title = "Bad request"


class MalformedBody(BadRequest):
    """The body does not match its content type."""

    type = "malformed-body"
    title = "Malformed body"


class NotFound(BoxcalError):
    """The requested resource does not exist."""

    status = 404
    type = "not-found"
    title = "Not found"


class ModelNotFound(NotFound):
    """No model has this name, or it has no such version."""

    type = "model-not-found"
    title = "Model not found"


class RouteNotFound(NotFound):
    """No route has this path."""

    type = "route-not-found"
    title = "Path not found"


class NoModel(NotFound):
    """The service has no model: it calibrates logits of a model that runs elsewhere."""

    type = "no-model"
    title = "No model"


class MethodNotAllowed(BoxcalError):
    """The path does not support this HTTP method."""

    status = 405
    type = "method-not-allowed"
    title = "Method not allowed"


class PayloadTooLarge(BoxcalError):
    """The request exceeds a size limit."""

    status = 413
    type = "payload-too-large"
    title = "Request too large"


class BodyTooLarge(PayloadTooLarge):
    """The body has more bytes than the limit."""

    type = "body-too-large"
    title = "Body too large"


class ImageTooLarge(PayloadTooLarge):
    """An image has more pixels than the limit. It was not decoded."""

    type = "image-too-large"
    title = "Image too large"


class TooManySamples(PayloadTooLarge):
    """The request has more samples than the queue can hold."""

    type = "too-many-samples"
    title = "Too many samples"


class RequestTooLarge(PayloadTooLarge):
    """The logits and the response would take more memory than the limit."""

    type = "request-too-large"
    title = "The request needs too much memory"


class UnsupportedMediaType(BoxcalError):
    """The route does not accept this content type."""

    status = 415
    type = "unsupported-media-type"
    title = "Unsupported content type"


class InvalidRequest(BoxcalError):
    """The request was parsed, but it is not valid."""

    status = 422
    type = "invalid-request"
    title = "Invalid request"


class InvalidParameter(InvalidRequest):
    """An option or field has the wrong type or is out of range."""

    type = "invalid-parameter"
    title = "Invalid parameter"


class InvalidBounds(InvalidRequest):
    """No probability vector satisfies the bounds."""

    type = "invalid-bounds"
    title = "Invalid bounds"


class InvalidLogits(InvalidRequest):
    """The logits have the wrong shape or are not finite."""

    type = "invalid-logits"
    title = "Invalid logits"


class InvalidInput(InvalidRequest):
    """An image cannot be decoded, or a tensor has the wrong shape for the backbone."""

    type = "invalid-input"
    title = "Invalid input"


class Unavailable(BoxcalError):
    """The service cannot accept the request now; `Retry-After` says when to retry."""

    status = 503
    type = "unavailable"
    title = "Service unavailable"

    def __init__(self, detail: str, *, retry_after: int = 1) -> None:
        super().__init__(detail, headers={"Retry-After": str(retry_after)})


class NotReady(Unavailable):
    """The service is starting or stopping."""

    type = "not-ready"
    title = "Service not ready"


class QueueFull(Unavailable):
    """The queue holds its maximum number of samples."""

    type = "queue-full"
    title = "Queue full"


class DeadlineExceeded(BoxcalError):
    """The timeout of the request passed before it was done.

    Attributes
    ----------
    set_by_client
        Whether the client set the timeout; the metrics count such requests apart.
    """

    status = 504
    type = "deadline-exceeded"
    title = "Timeout exceeded"
    set_by_client = False


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
    """Return the `responses=` argument of a route that may raise these errors or fail with an internal error.

    Errors with the same status share one entry.
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
    """The members of one RFC 9457 document.

    Attributes
    ----------
    kind
        The last part of the document's `type`.
    """

    status: int
    kind: str
    title: str
    detail: str
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, error: Exception) -> Problem:
        """Describe any exception that a route raises."""
        if isinstance(error, BoxcalError):
            return cls(error.status, error.type, error.title, error.detail, error.headers)
        if isinstance(error, RequestValidationError):
            return cls.of(InvalidParameter(describe_validation(error.errors())))
        if isinstance(error, HTTPException):
            known = BY_STATUS.get(error.status_code)
            phrase = http.HTTPStatus(error.status_code).phrase
            kind, title = (known.type, known.title) if known else (phrase.lower().replace(" ", "-"), phrase)
            return cls(error.status_code, kind, title, str(error.detail), error.headers or {})
        return cls.of(InternalError("Internal error; see the server log."))

    def document(self, request_id: str) -> bytes:
        """Write the JSON document for the request with this id."""
        # The detail quotes the request, which may contain a lone surrogate; UTF-8 cannot encode it.
        detail = self.detail.encode("utf-8", "backslashreplace").decode()
        return orjson.dumps(
            {
                "type": f"urn:boxcal:problem:{self.kind}",
                "title": self.title,
                "status": self.status,
                "detail": detail,
                "error": detail,
                "request_id": request_id,
            }
        )


def describe_validation(errors: Sequence[Any], *prefix: str) -> str:
    """Describe the first pydantic error and quote the offending value."""
    first = errors[0]
    place = ".".join((*prefix, *(str(part) for part in first["loc"])))
    wrong = "Input should be an object" if first["type"] == "model_type" else first["msg"]
    message = f"{place}: {wrong}"
    if first["type"] != "missing" and isinstance(first.get("input"), str | int | float | bool | None):
        message += f", got {first['input']!r:.200}"
    more = len(errors) - 1
    return message + (f" (and {more} more)" if more else "") + "."
