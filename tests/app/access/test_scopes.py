"""Every route with every scope, and with no, a wrong, an expired and a revoked key."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import httpx
import pytest
from fastapi.routing import APIRoute

from boxcal.app.access.keys import KeyStore
from boxcal.app.http.scopes import ROUTES, Level, Requirement, Scope
from boxcal.app.main import all_routes, create_app
from tests.app.access.conftest import TESTER, Guarded, sqlite_url
from tests.app.fitting.validation_data import validation_npz
from tests.app.running import running

REFUSED = {"none": "api-key-required", "wrong": "invalid-api-key", "revoked": "invalid-api-key",
           "expired": "api-key-expired"}  # fmt: skip
VALUES = {"{fit_id}": "0000", "{version}": "999", "{digest}": "0000", "{name}": "main.js"}


def address(template: str) -> str:
    for parameter, value in VALUES.items():
        template = template.replace(parameter, value)
    return template


def meets(scope: str, requirement: Requirement) -> bool:
    """Whether a key with one scope may use a route: written out here, not asked of the code."""
    if requirement is Level.OPEN or requirement is Level.KEY:
        return True
    return scope in {"admin", requirement.value}


def test_every_route_is_in_the_table_and_nothing_else() -> None:
    routes = {
        (method, getattr(route, "path_format", ""))
        for route in all_routes(create_app())
        for method in getattr(route, "methods", None) or ()
        if isinstance(route, APIRoute) or method == "GET"
    }
    assert routes == set(ROUTES)


@pytest.mark.parametrize("route", list(ROUTES), ids=" ".join)
def test_the_scope_matrix(guarded: Guarded, route: tuple[str, str]) -> None:
    method, template = route
    requirement = ROUTES[route].requirement
    with httpx.Client(base_url=guarded.url, timeout=30) as http:
        for key in [*Scope, *REFUSED]:
            with http.stream(method, address(template), headers=guarded.headers(key)) as answer:
                if answer.status_code >= 400:  # a stream of events would not end
                    answer.read()
            kind = answer.json()["type"].rpartition(":")[2] if answer.status_code >= 400 else ""
            if requirement is Level.OPEN:
                assert answer.status_code not in {401, 403}, key
            elif key in REFUSED:
                assert (answer.status_code, kind) == (401, REFUSED[key]), key
                assert answer.headers["www-authenticate"].startswith("Bearer")
            elif meets(key, requirement):
                assert answer.status_code not in {401, 403}, key
            else:
                assert (answer.status_code, kind) == (403, "insufficient-scope"), key
                assert requirement.value in answer.json()["detail"]


def test_a_head_request_requires_what_get_does(guarded: Guarded) -> None:
    assert httpx.head(f"{guarded.url}/stats").status_code == 401
    assert httpx.head(f"{guarded.url}/stats", headers=guarded.headers("predict")).status_code == 403
    assert httpx.head(f"{guarded.url}/stats", headers=guarded.headers("read")).status_code == 200


@pytest.mark.parametrize("path", ["/none", "/predict/", "//stats", "/calibrators/rollback/", "/ui/x"])
def test_paths_without_a_route_require_a_key(guarded: Guarded, path: str) -> None:
    assert httpx.get(guarded.url + path).status_code == 401
    assert httpx.post(guarded.url + path).status_code == 401


@pytest.mark.parametrize(
    "path", ["/v2/models/digits/infer", "/v2/models/digits/versions//infer", "/v2/models/a/b/infer"]
)
def test_every_path_that_infers_requires_the_scope_predict(guarded: Guarded, path: str) -> None:
    refused = httpx.post(guarded.url + path, headers=guarded.headers("read"), content=b"{}")
    assert refused.json()["type"].endswith(":insufficient-scope"), refused.text
    permitted = httpx.post(guarded.url + path, headers=guarded.headers("predict"), content=b"{}")
    assert permitted.status_code in {404, 422}, permitted.text


@pytest.mark.parametrize(
    ("root", "path"),
    [("/calibrate", "/calibrate"), ("/predict", "/predict"), ("/v2", "/v2/models/digits/infer")],
)
def test_a_root_path_like_a_route_changes_no_requirement(root: str, path: str, tmp_path: Path) -> None:
    store = KeyStore.at(sqlite_url(tmp_path))
    keys = {scope: store.create(scope, {scope}, TESTER)[1] for scope in (Scope.READ, Scope.PREDICT)}
    store.close()
    with running(tmp_path, root_path=root) as service:
        for scope, key in keys.items():
            answer = httpx.post(f"{service.url}{root}{path}", headers={"X-API-Key": key}, content=b"{}")
            assert answer.status_code in ({403} if scope is Scope.READ else {400, 404, 415, 422}), answer.text


def test_a_key_is_taken_from_either_header(guarded: Guarded) -> None:
    key = guarded.keys["read"]
    for headers in ({"X-API-Key": key}, {"authorization": f"bearer  {key}"}):
        answer = httpx.get(f"{guarded.url}/whoami", headers=headers)
        assert answer.json() == {
            "key_required": True,
            "key": key.split("_")[1],
            "name": "read",
            "scopes": ["read"],
            "expires_at": None,
        }
    for given in ("", "boxcal_", key[:-1], key + "A", key.replace("boxcal", "BOXCAL"), "x" * 60_000, "é"):
        sent = {"X-API-Key": given.encode()}
        assert httpx.get(f"{guarded.url}/whoami", headers=sent).status_code == 401  # type: ignore[arg-type]


def test_a_fit_that_may_activate_requires_the_scope_activate(guarded: Guarded) -> None:
    def fits() -> list[str]:
        listed = httpx.get(f"{guarded.url}/fits", headers=guarded.headers("read")).json()
        return [entry["id"] for entry in listed["fits"]]

    before = fits()
    for policy, status in (("always", 403), ("if_better", 403), ("never", 202)):
        data, files = {"method": "ts", "activate": policy}, {"file": validation_npz(60)}
        own = guarded.headers("fit")
        answer = httpx.post(f"{guarded.url}/fit", headers=own, timeout=60, data=data, files=files)
        assert answer.status_code == status, answer.text
        if status == 403:
            assert "activate=never" in answer.json()["detail"]
    fit = answer.json()["id"]
    with httpx.Client(base_url=guarded.url, headers=guarded.headers("admin"), timeout=60) as http:
        http.get(f"/fits/{fit}/events")  # until it ends
    assert fits() == [fit, *before]


def test_the_document_declares_what_each_route_requires(guarded: Guarded) -> None:
    document = httpx.get(f"{guarded.url}/openapi.json").json()
    assert set(document["components"]["securitySchemes"]) == {"bearer", "header"}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            requirement = ROUTES[method.upper(), path].requirement
            assert operation.get("x-required-scope") == (
                None if requirement is Level.OPEN else requirement.value
            )
            assert ("401" in operation["responses"]) == (requirement is not Level.OPEN)


def test_wrong_keys_are_logged_once_a_minute_counted_and_answered_ever_later(
    guarded: Guarded, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = guarded.service.state.admission.access
    monkeypatch.setattr(access, "_guesses", Counter())
    with httpx.Client(base_url=guarded.url) as http:
        metric = 'boxcal_rejected_total{reason="invalid-api-key"} '

        def counted() -> float:
            text = http.get("/metrics", headers=guarded.headers("read")).text
            return float(text.partition(metric)[2].split()[0])

        before = counted()
        for _ in range(3):
            assert http.get("/version", headers=guarded.headers("wrong")).status_code == 401
        assert counted() - before == 3
    assert [r.getMessage() for r in caplog.records if "API key" in r.getMessage()] == [
        "An API key from 127.0.0.1 is not valid; more within a minute are counted."
    ]
    monkeypatch.setattr("boxcal.app.access.access.LONGEST_WAIT", 2.0)
    waits = [access.guessed("10.0.0.7") for _ in range(60)]
    assert waits[:7] == [0, 0, 0, 0, 0, 0.05, 0.1]
    assert waits[-1] == 2.0
