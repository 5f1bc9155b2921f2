"""The OpenAPI document against the running service: what it declares is what happens."""

from __future__ import annotations

from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from openapi_spec_validator import validate
from schemathesis import Case
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from boxcal.app.http.problem_documents import media_type
from tests.app.fitting.validation_data import validation_npz
from tests.app.running import Service

LEFT_OUT = ("/fit", "/fits", "/metrics", "/monitor/events")
CHECKS = [status_code_conformance, response_schema_conformance, content_type_conformance]


def test_what_is_declared_is_what_happens(service: Service) -> None:
    """Requests made from the document, valid and not, of every route that does not start a fit."""
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations() if isinstance(result, Ok)]
    tried = [operation for operation in operations if not operation.path.startswith(LEFT_OUT)]
    assert len(tried) >= 10
    for operation in tried:

        @settings(max_examples=12, suppress_health_check=list(HealthCheck), database=None)
        @seed(0)
        @given(case=operation.as_strategy())
        def check(case: Case[Any]) -> None:
            response = case.call(timeout=30)
            case.validate_response(response, checks=CHECKS)
            assert response.status_code != 500

        check()


def test_a_stream_of_events_conforms_to_the_document(service: Service, http: httpx.Client) -> None:
    file = {"file": ("v", validation_npz(60))}
    fit = http.post("/fit", files=file, data={"method": "ts", "activate": "never"}).json()
    schema = schemathesis.openapi.from_url(f"{service.url}/openapi.json")
    case = schema["/fits/{fit_id}/events"]["GET"].Case(path_parameters={"fit_id": fit["id"]})
    response = case.call_and_validate(checks=CHECKS)
    assert response.status_code == 200
    assert b"data: " in response.content


def test_every_route_declares_problems_and_the_schema_exists(http: httpx.Client) -> None:
    document = http.get("/openapi.json").json()
    required = document["components"]["schemas"]["Problem"]["required"]
    assert set(required) == {"type", "title", "status", "detail", "error", "request_id"}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            errors = {code for code in operation["responses"] if code.startswith(("4", "5"))}
            assert "500" in errors
            for code in errors:
                assert set(operation["responses"][code]["content"]) == {media_type(path)}


def test_the_document_is_valid_openapi(http: httpx.Client) -> None:
    validate(http.get("/openapi.json").json())


def test_the_document_declares_the_kinds_of_bodies(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    texts, images = {"text/csv", "text/plain"}, {"image/jpeg", "image/png", "image/webp"}
    arrays = {"application/json", "application/x-npy"}
    bodies = {path: set(paths[path]["post"]["requestBody"]["content"]) for path in ("/predict", "/calibrate")}
    assert bodies["/predict"] == arrays | images | texts | {"multipart/form-data"}
    assert bodies["/calibrate"] == arrays
    assert {"400", "413", "415", "422", "503", "504"} <= set(paths["/predict"]["post"]["responses"])
    assert http.get("/docs").status_code == 200


def test_a_nul_in_an_address_is_refused_as_every_route_declares(service: Service) -> None:
    document = httpx.get(f"{service.url}/openapi.json").json()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert "400" in operation["responses"], (method, path)
    for method, target in (
        ("GET", "/fits/%00"),
        ("DELETE", "/fits/%00"),
        ("GET", "/fits?before_fit=%00"),
        ("GET", "/fits/a%00b"),
    ):
        answer = httpx.request(method, service.url + target)
        assert (answer.status_code, answer.json()["type"]) == (400, "urn:boxcal:problem:bad-request")
        assert "NUL" in answer.json()["detail"]
    noted = httpx.post(f"{service.url}/monitor/acknowledge", json={"note": "a\0b"})
    assert (noted.status_code, "NUL character" in noted.text) == (422, True)
