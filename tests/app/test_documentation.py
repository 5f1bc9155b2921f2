"""`/docs` and `/openapi.json` are complete, and their examples are true: they are sent to a service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from boxcal.app.http import openapi
from boxcal.app.http.problem_documents import PROBLEM_MEDIA_TYPE
from tests.app.fitting.validation_data import validation_npz

Document = dict[str, Any]


@pytest.fixture(scope="module")
def document(busy_url: str) -> Document:
    answer: Document = httpx.get(f"{busy_url}/openapi.json").json()
    return answer


def operations(document: Document) -> Iterator[tuple[str, Document]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def test_everything_is_described(document: Document) -> None:
    silent = []
    tags = {tag["name"] for tag in document["tags"] if tag["description"]}
    for name, operation in operations(document):
        if not operation["description"] or not set(operation["tags"]) <= tags:
            silent.append(name)
        silent += [f"{name} {p['name']}" for p in operation.get("parameters", []) if not p.get("description")]
        silent += [
            f"{name} {status}"
            for status, answer in operation["responses"].items()
            if answer["description"] in ("", "Successful Response")
        ]
    assert not silent


def test_operations_have_names_that_a_generated_client_can_use(document: Document) -> None:
    names = [operation["operationId"] for _, operation in operations(document)]
    assert len(set(names)) == len(names)
    assert all(
        name.isidentifier() and "__" not in name and not name.endswith(("_get", "_post")) for name in names
    )


def test_every_body_answer_refusal_and_parameter_has_an_example(document: Document) -> None:
    missing = []
    for name, operation in operations(document):
        missing += [f"{name} {p['name']}" for p in operation.get("parameters", []) if not _examples(p)]
        parts = [("body", operation.get("requestBody", {})), *operation["responses"].items()]
        for part, described in parts:
            for kind, content in described.get("content", {}).items():
                if kind in ("application/json", "multipart/form-data", PROBLEM_MEDIA_TYPE):
                    missing += [] if _examples(content) else [f"{name} {part} {kind}"]
    assert not missing


def test_examples_obey_their_schemas(document: Document) -> None:
    for _, operation in operations(document):
        for described in (operation.get("requestBody", {}), *operation["responses"].values()):
            for kind, content in described.get("content", {}).items():
                for example in _examples(content):
                    schema = {**content["schema"], "components": document["components"]}
                    if kind == "multipart/form-data":  # a file cannot stand in the document
                        schema["required"] = [part for part in schema.get("required", []) if part != "file"]
                    jsonschema.validate(example, schema)


@pytest.mark.parametrize("path", ["/predict", "/calibrate"])
def test_what_the_examples_ask_is_what_they_are_answered(
    document: Document, busy_url: str, path: str
) -> None:
    operation = document["paths"][path]["post"]
    body = operation["requestBody"]["content"]["application/json"]["example"]
    promised = operation["responses"]["200"]["content"]["application/json"]["example"]
    body["options"] |= {"calibrator": 0}
    answer = httpx.post(f"{busy_url}{path}", json=body).raise_for_status().json()
    assert answer["timing_ms"].keys() == promised["timing_ms"].keys()
    for shown, real in zip(_numbers(promised), _numbers(answer), strict=True):
        assert real == pytest.approx(shown, abs=1e-5)
    assert answer["predictions"][0]["top"][0]["bound"] == promised["predictions"][0]["top"][0]["bound"]


def test_answers_have_the_members_that_the_examples_show(busy_url: str) -> None:
    with httpx.Client(base_url=busy_url, timeout=300) as http:
        upload = {"file": ("validation.npz", validation_npz())}
        done = http.post(
            "/fit", params={"wait": 240}, files=upload, data={"method": "ts", "activate": "never"}
        )
        assert done.status_code == 200
        assert done.json().keys() == openapi.SUCCEEDED.keys()
        version = done.json()["calibrator"]
        assert http.get("/fits").json()["fits"][0].keys() == openapi.SUCCEEDED.keys()
        assert http.get(f"/calibrators/{version}").json().keys() == openapi.CALIBRATOR.keys()
        assert http.get("/calibrators/0").json().keys() == openapi.UNCALIBRATED.keys()
        assert openapi.REPORT.keys() <= http.get(f"/calibrators/{version}/report").json().keys()
        assert http.get("/health/live").json() == {"status": "live"}
        ready = openapi.ANSWERS["get", "/health/ready", "200"][1]
        assert http.get("/health/ready").json().keys() == ready.keys()
        refused = http.get("/calibrators/9999").json()
        assert refused.keys() == {"type", "title", "status", "detail", "error", "request_id"}
        assert (
            http.post("/fit", files=upload, data={"activate": "never"}).json().keys() == openapi.QUEUED.keys()
        )


def test_every_example_belongs_to_something(document: Document) -> None:
    """A route that is renamed must not leave its examples behind."""
    known = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert openapi.BODIES.keys() <= known
    assert {(method, path) for method, path, _ in openapi.ANSWERS} <= known
    parameters = {p["name"] for _, operation in operations(document) for p in operation.get("parameters", [])}
    assert openapi.PARAMETERS.keys() == parameters


def _examples(described: Document) -> list[Any]:
    """Every example of a parameter or a content."""
    if "content" in described:
        return [example for content in described["content"].values() for example in _examples(content)]
    named = [example["value"] for example in described.get("examples", {}).values()]
    return [described["example"], *named] if "example" in described else named


def _numbers(answer: Document) -> list[float]:
    (prediction,) = answer["predictions"]
    return [prediction["probability"], *(entry["probability"] for entry in prediction["top"])]
