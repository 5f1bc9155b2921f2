"""How problems appear in responses, as RFC 9457 documents, and in the OpenAPI document, completed here."""

from __future__ import annotations

import http
from typing import Any

import orjson
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from boxcal.app.http.problems import (
    ApiKeyExpired,
    ApiKeyRequired,
    BadRequest,
    BodyTooLarge,
    BoxcalError,
    ConcurrencyLimited,
    InsufficientScope,
    InternalError,
    InvalidApiKey,
    InvalidParameter,
    MalformedBody,
    MethodNotAllowed,
    ModelNotFound,
    ProblemType,
    RateLimited,
    RouteNotFound,
    Unavailable,
    UnsupportedMediaType,
    describe_validation,
)
from boxcal.app.http.scopes import ROUTES, Level, Requirement
from boxcal.app.schemas.service import Problem

PROBLEM_MEDIA_TYPE = "application/problem+json"
CLIENT_CLOSED = 499
"""Status recorded in the metrics when the client disconnected before its response."""
BY_STATUS = {
    one.status: one
    for one in (
        MalformedBody,
        RouteNotFound,
        MethodNotAllowed,
        BodyTooLarge,
        UnsupportedMediaType,
        Unavailable,
    )
}
JSON, EVENTS = "application/json", "text/event-stream"
TAGS = {
    "predict": "Calibrated probabilities within the bounds of each request.",
    "feedback": "True labels of earlier predictions, alarms and refits.",
    "fits": "Fit a calibrator to validation data and get a report.",
    "calibrators": "List, activate and roll back calibrators.",
    "model": "The model that is served, and the calibration methods.",
    "access": "The API key of a request, and the audit log.",
    "monitoring": "Liveness, readiness and metrics.",
}
SECURITY_SCHEMES = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "API key, where keys are required.",
    },
    "header": {"type": "apiKey", "in": "header", "name": "X-API-Key", "description": "The same."},
}
REFUSALS = (ApiKeyRequired, InvalidApiKey, ApiKeyExpired, InsufficientScope, RateLimited, ConcurrencyLimited)
UNDESCRIBED = "Successful Response"
"""What FastAPI writes where a route has no description of its response."""


def kind_of(problem: ProblemType | type[BoxcalError]) -> ProblemType:
    """Return a row of the table, or that of a class."""
    return problem if isinstance(problem, ProblemType) else problem.default


def media_type(path: str) -> str:
    """Return the media type of an error: clients of the Open Inference Protocol read errors as plain JSON."""
    return "application/json" if f"{path}/".startswith("/v2/") else PROBLEM_MEDIA_TYPE


def problems(*declared: ProblemType | type[BoxcalError]) -> dict[int | str, dict[str, Any]]:
    """Return the `responses=` argument of a route that may have these problems or an internal error.

    Problems with the same status share one entry.
    """
    kinds: dict[int, dict[str, ProblemType]] = {}
    for kind in map(kind_of, (*declared, InternalError)):
        kinds.setdefault(kind.status, {}).setdefault(kind.title, kind)
    return {
        status: {
            "description": "; ".join(kinds[status]),
            "content": {
                PROBLEM_MEDIA_TYPE: {
                    "schema": {"$ref": "#/components/schemas/Problem"},
                    "examples": {one.type: example_of(one) for one in kinds[status].values()},
                }
            },
        }
        for status in sorted(kinds)
    }


def example_of(kind: ProblemType) -> dict[str, Any]:
    """Return an example of a problem; its meaning is the detail."""
    text = {"type": f"urn:boxcal:problem:{kind.type}", "title": kind.title, "status": kind.status}
    detail = dict.fromkeys(("detail", "error"), kind.meaning)
    return {"summary": kind.title, "value": {**text, **detail, "request_id": "5b0c1f6e00000017"}}


def as_problem(error: Exception) -> BoxcalError:
    """Describe any exception that a route raises."""
    if isinstance(error, BoxcalError):
        return error
    if isinstance(error, RequestValidationError):
        return InvalidParameter(describe_validation(error.errors()))
    if isinstance(error, HTTPException):
        known = BY_STATUS.get(error.status_code)
        phrase = http.HTTPStatus(error.status_code).phrase
        kind, title = (known.type, known.title) if known else (phrase.lower().replace(" ", "-"), phrase)
        row = ProblemType(error.status_code, kind, title, "")
        return row(str(error.detail), headers=error.headers)
    return InternalError("Internal error; see the server log.")


def document(problem: BoxcalError, request_id: str) -> bytes:
    """Write the document of a problem for the request with this id."""
    # The detail quotes the request, which may contain a lone surrogate; UTF-8 cannot encode it.
    detail = problem.detail.encode("utf-8", "backslashreplace").decode()
    return orjson.dumps(
        {
            "type": f"urn:boxcal:problem:{problem.type}",
            "title": problem.kind.title,
            "status": problem.status,
            "detail": detail,
            "error": detail,
            "request_id": request_id,
        }
    )


def complete(document: dict[str, Any]) -> None:
    """Declare keys and problems, FastAPI's validation errors included, and describe responses by models."""
    document["tags"] = [{"name": name, "description": text} for name, text in TAGS.items()]
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas["Problem"] = Problem.model_json_schema()
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    document["components"]["securitySchemes"] = SECURITY_SCHEMES
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            require_key(operation, ROUTES[method.upper(), path].requirement)
            declare_problems(operation)
            for answer in operation["responses"].values():
                content = answer.get("content", {})
                if EVENTS in content:  # a schema of each event exists in OpenAPI 3.2 only
                    content[EVENTS] = {}
                if answer["description"] == UNDESCRIBED:
                    model = content[JSON]["schema"]["$ref"].rpartition("/")[2]
                    answer["description"] = schemas[model].get("description", UNDESCRIBED)


def require_key(operation: dict[str, Any], requirement: Requirement) -> None:
    """Declare what access requires."""
    if requirement is Level.OPEN:
        operation["security"] = []
        return
    operation["security"] = [{name: []} for name in SECURITY_SCHEMES]
    operation["x-required-scope"] = requirement.value
    operation["responses"] |= {
        str(status): answer for status, answer in problems(*REFUSALS).items() if status != 500
    }


def declare_problems(operation: dict[str, Any]) -> None:
    """Declare that the model that is asked for may not exist, and that parameters may be invalid.

    A path or a query string with a NUL character is refused with 400 before the route is looked up.
    """
    responses = operation["responses"]
    responses.setdefault(str(BadRequest.status), problems(BadRequest)[BadRequest.status])
    if any(one["name"] == "model" for one in operation.get("parameters", ())):
        responses.setdefault(str(ModelNotFound.status), problems(ModelNotFound)[ModelNotFound.status])
    status = str(InvalidParameter.status)
    if PROBLEM_MEDIA_TYPE not in responses.get(status, {}).get("content", {}):
        responses[status] = problems(InvalidParameter)[InvalidParameter.status]
