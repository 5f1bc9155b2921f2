"""Completes the OpenAPI document that FastAPI generates: API keys, problems and descriptions of responses."""

from __future__ import annotations

from typing import Any

from boxcal.app.http.problem_documents import PROBLEM_MEDIA_TYPE, problems
from boxcal.app.http.problems import (
    ApiKeyExpired,
    ApiKeyRequired,
    BadRequest,
    ConcurrencyLimited,
    InsufficientScope,
    InvalidApiKey,
    InvalidParameter,
    ModelNotFound,
    RateLimited,
)
from boxcal.app.http.scopes import ROUTES, Level, Requirement
from boxcal.app.schemas.service import Problem

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
                    answer["description"] = schemas[model]["description"]


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
