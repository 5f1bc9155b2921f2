"""Comparing versions and methods on one uploaded validation set, against a real service."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from boxcal.app.client import BoxcalClient
from tests.app.fitting.service import Service
from tests.app.fitting.validation_data import validation_npz

DATA = validation_npz(300)


@pytest.fixture(scope="module")
def versions(service: Service) -> tuple[int, int]:
    ts, pb = (service.fit(DATA, method=method, activate="never").json() for method in ("ts", "pb"))
    return ts["calibrator"], pb["calibrator"]


def compare(service: Service, query: str, content: bytes, **fields: str) -> httpx.Response:
    return service.client.post(f"/compare?{query}", files={"file": ("v", content)}, data=fields)


def row(document: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in document["methods"] if one["method"].startswith(name))
    return found


def test_two_versions_are_compared_sample_by_sample(service: Service, versions: tuple[int, int]) -> None:
    ts, pb = versions
    data = validation_npz(400, seed=5)
    with BoxcalClient(service.url) as client:
        document = client.compare(data, versions=[ts, pb], methods=["ts"])
    assert [one["method"] for one in document["methods"]] == [
        "uncalibrated", f"version {ts} (ts)", f"version {pb} (pb)", "ts",
    ]  # fmt: skip
    first, second = row(document, f"version {ts}"), row(document, f"version {pb}")
    assert (first["base"], second["base"]) == ("uncalibrated", f"version {ts} (ts)")
    for metric in ("nll", "brier", "smooth_ece"):
        one, other = first["metrics"][metric], second["metrics"][metric]
        assert other["change"]["value"] == pytest.approx(other["value"] - one["value"])
        assert other["change"]["low"] <= other["change"]["value"] <= other["change"]["high"]
    assert [line.partition(",")[0] for line in document["sentences"]] == [
        f"Version {ts} (ts)", f"Version {pb} (pb)",
    ]  # fmt: skip
    assert document["warnings"] == []
    turned = compare(service, f"versions={pb}&versions={ts}", data).json()
    back = row(turned, f"version {ts}")["metrics"]["nll"]["change"]
    assert back["value"] == pytest.approx(-second["metrics"]["nll"]["change"]["value"])


def test_data_that_a_version_was_fitted_to_are_named(service: Service, versions: tuple[int, int]) -> None:
    document = compare(service, f"versions=0&versions={versions[0]}", DATA).json()
    (warning,) = document["warnings"]
    assert warning["code"] == "known_rows"
    assert f"version {versions[0]} (ts) was fitted to" in warning["message"]
    assert row(document, "version")["base"] == "uncalibrated"


@pytest.mark.parametrize(
    ("query", "sent", "status", "kind"),
    [
        ("", {}, 422, "invalid-parameter"),
        ("versions=-1", {}, 422, "invalid-parameter"),
        ("versions=99", {}, 404, "calibrator-not-found"),
        ("methods=magic", {}, 422, "unknown-method"),
        ("methods=fc", {}, 422, "unknown-method"),
        ("versions=0", {"content": b"no file"}, 415, "unknown-upload-format"),
        ("versions=0", {"method": "ts"}, 422, "invalid-parameter"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_words(
    service: Service, query: str, sent: dict[str, Any], status: int, kind: str
) -> None:
    answer = compare(service, query, **{"content": validation_npz(50), **sent})
    assert (answer.status_code, answer.json()["type"]) == (status, f"urn:boxcal:problem:{kind}")
