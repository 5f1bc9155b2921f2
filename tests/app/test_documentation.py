"""`/docs` and `/openapi.json` are complete, and their examples are true: they are sent to a service."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

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


def test_the_example_of_every_answer_obeys_its_schema(document: Document) -> None:
    """Swagger UI builds the example from those of the members, which every text has."""
    for name, operation in operations(document):
        for status, answer in operation["responses"].items():
            content = answer.get("content", {})
            if "application/json" in content:
                schema = content["application/json"]["schema"]
                example = example_of(schema, document, f"{name} {status}")
                jsonschema.validate(example, {**schema, "components": document["components"]})


def test_examples_of_problems_and_bodies_obey_their_schemas(document: Document) -> None:
    for name, operation in operations(document):
        for described in (operation.get("requestBody", {}), *operation["responses"].values()):
            for kind, content in described.get("content", {}).items():
                schema = {**content.get("schema", {}), "components": document["components"]}
                examples = [example["value"] for example in content.get("examples", {}).values()]
                assert examples or kind != PROBLEM_MEDIA_TYPE, name
                for example in [*examples, *([content["example"]] if "example" in content else [])]:
                    jsonschema.validate(example, schema)


@pytest.mark.parametrize("path", ["/predict", "/calibrate", "/feedback", "/monitor/acknowledge"])
def test_example_bodies_are_accepted(document: Document, busy_url: str, path: str) -> None:
    operation = document["paths"][path]["post"]
    schema = operation["responses"]["200"]["content"]["application/json"]["schema"]
    for kind, content in operation["requestBody"]["content"].items():
        if kind == "application/json" or "example" in content:
            body = content.get("example") or example_of(content["schema"], document, path)
            sent: Document = {"json": body} if kind == "application/json" else {"content": body}
            answer = httpx.post(f"{busy_url}{path}", headers={"content-type": kind}, **sent)
            jsonschema.validate(
                answer.raise_for_status().json(), {**schema, "components": document["components"]}
            )


@pytest.mark.parametrize("path", ["/predict", "/calibrate"])
def test_bounds_of_the_examples_matter(document: Document, busy_url: str, path: str) -> None:
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
    options = {**body["options"], "calibrator": 0}
    answer = httpx.post(f"{busy_url}{path}", json={**body, "options": options}).raise_for_status().json()
    (prediction,) = answer["predictions"]
    assert prediction["top"][0]["bound"] == "upper"
    assert prediction["probability"] == options["bounds"]["upper"]


@pytest.mark.parametrize("path", ["/fit", "/compare"])
def test_example_uploads_are_read(document: Document, busy_url: str, path: str) -> None:
    """They are too short for a fit, and refused for that alone."""
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["example"]
    query = {"methods": "ts"} if path == "/compare" else {}
    refused = httpx.post(f"{busy_url}{path}", params=query, json=body)
    assert refused.status_code == 422
    assert refused.json()["detail"].startswith("The validation set has 2 samples")


def test_answers_have_the_members_that_their_schemas_list(document: Document, busy_url: str) -> None:
    def listed(answer: Document, schema: str) -> Document:
        assert answer.keys() <= document["components"]["schemas"][schema]["properties"].keys()
        return answer

    with httpx.Client(base_url=busy_url, timeout=300) as http:
        upload = {"file": ("validation.npz", validation_npz())}
        done = http.post(
            "/fit", params={"wait": 240}, files=upload, data={"method": "ts", "activate": "never"}
        )
        assert done.status_code == 200
        version = listed(done.json(), "Fit")["calibrator"]
        assert "error" not in done.json()
        assert listed(http.get("/fits").json()["fits"][0], "Fit").keys() == done.json().keys()
        listed(http.get(f"/calibrators/{version}").json(), "CalibratorDocument")
        assert http.get("/calibrators/0").json().keys() == {"version", "method", "active"}
        assert http.get("/health/live").json() == {"status": "live"}
        listed(http.get("/health/ready").json(), "Ready")
        listed(http.get("/calibrators/9999").json(), "Problem")
        queued = http.post("/fit", files=upload, data={"activate": "never"}).json()
        assert listed(queued, "Fit").keys().isdisjoint({"calibrator", "started_at", "finished_at", "error"})


def example_of(schema: Document, document: Document, name: str) -> Any:
    """Build an example as Swagger UI does; every text needs one, or a choice of values."""
    if "$ref" in schema:
        part = schema["$ref"].rpartition("/")[2]
        return example_of(document["components"]["schemas"][part], document, part)
    chosen = [
        *schema.get("examples", []),
        *schema.get("enum", []),
        schema.get("const"),
        schema.get("default"),
    ]
    example = next((one for one in chosen if one is not None), None)
    if example is None and "anyOf" in schema:
        example = example_of(schema["anyOf"][0], document, name)
    if example is None and schema["type"] == "object":
        members = schema.get("properties", {}).items()
        example = {key: example_of(value, document, f"{name}.{key}") for key, value in members}
    if example is None and schema["type"] == "array":
        example = [example_of(schema["items"], document, name)]
    if example is None:
        assert schema["type"] != "string", f"{name} has no example"
        example = True if schema["type"] == "boolean" else schema.get("minimum", 0)
    return example
