"""A service with several models: each has its own calibrators, bounds, queue, metrics and monitor.

`north` and `south` have the same backbone. The data folder is that of a service which had it alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from boxcal.app.client import BoxcalClient
from boxcal.app.http.problems import BoxcalError
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.registry.records import FittedCalibrator
from boxcal.app.settings.service import Settings
from boxcal.app.state import build
from boxcal.calibrators import fit as fitted
from boxcal.models import BackboneError
from tests.app.fitting.service import free_port
from tests.app.fitting.validation_data import overconfident, validation_npz
from tests.app.running import Service, running

FILE = """
[north]
model = "digits"

[south]
model = "digits"
upper = 0.6
share = 2

[elsewhere]
model = "logits:3"
"""
LOGITS = np.linspace(-3.0, 9.0, 10)[None]


def fit(http: httpx.Client, classes: int = 10, **query: str) -> int:
    data, files = {"method": "ts", "activate": "always"}, {"file": validation_npz(200, classes)}
    answer = http.post("/fit", params={"wait": "240", **query}, data=data, files=files)
    assert answer.json()["state"] == "succeeded", answer.text
    version: int = answer.json()["calibrator"]
    return version


def active(http: httpx.Client, model: str) -> tuple[int, list[float]]:
    answer = http.post(
        "/calibrate",
        params={"model": model},
        json={"logits": LOGITS.tolist(), "options": {"probabilities": True, "bounds": {}}},
    ).json()
    return answer["calibrator"]["version"], answer["predictions"][0]["probabilities"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("several")
    with running(folder) as alone:
        logits, labels = (torch.from_numpy(array) for array in overconfident(200, 10))
        artifact = fitted("ts", logits, labels).calibrator.to_bytes()
        registry = alone.state.default.registry
        added = registry.add(FittedCalibrator("ts", artifact, {}, {"warnings": []}, b"", b"", 200))
        assert registry.activations.activate(added).version == 1
    file = folder / "models.toml"
    file.write_text(FILE)
    with running(folder, model=str(file), grpc_port=free_port()) as service:
        yield service


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=300) as client:
        yield client


def test_the_first_model_is_the_default_and_continues_what_the_backbone_had_alone(http: httpx.Client) -> None:
    body = {"logits": LOGITS.tolist()}
    default, named = (
        http.post("/calibrate", params=query, json=body).json() for query in ({}, {"model": "north"})
    )
    assert default["model"] == named["model"] == "north"
    assert default["calibrator"] == named["calibrator"] == {"version": 1, "method": "ts"}
    assert active(http, "south")[0] == 0


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/predict"),
        ("POST", "/calibrate"),
        ("POST", "/fit"),
        ("GET", "/calibrators"),
        ("POST", "/calibrators/rollback"),
        ("GET", "/model"),
        ("GET", "/monitor"),
        ("GET", "/stats"),
    ],
)
def test_an_unknown_model_is_not_found_and_the_names_are_listed(
    http: httpx.Client, method: str, path: str
) -> None:
    answer = http.request(method, path, params={"model": "nort"})
    assert answer.status_code == 404
    assert answer.json()["type"].endswith("model-not-found")
    assert "did you mean 'north'" in answer.json()["detail"]
    assert answer.json()["detail"].endswith("The models are north, south, elsewhere.")


def test_activating_one_never_touches_the_others(http: httpx.Client) -> None:
    before = {name: active(http, name) for name in ("north", "south")}
    version = fit(http, model="south")
    assert active(http, "north") == before["north"]
    assert active(http, "south")[0] == version
    foreign = http.post(f"/calibrators/{version}/activate", params={"model": "north"})
    assert foreign.status_code == 409
    assert f"Calibrator {version} belongs to the backbone 'digits' of the model 'south'" in foreign.text
    assert http.post("/calibrators/rollback", params={"model": "south"}).json()["version"] == 0
    assert {name: active(http, name) for name in ("north", "south")} == before
    assert http.post(f"/calibrators/{version}/activate", params={"model": "south"}).is_success
    assert active(http, "north") == before["north"]
    listed = http.get("/calibrators", params={"model": "south"}).json()["calibrators"]
    assert {one["version"]: one["active"] for one in listed} == {version: True, 0: False}
    history = http.get("/activations", params={"model": "north"}).json()["activations"]
    assert [one["version"] for one in history] == [1]


@pytest.mark.parametrize(
    ("method", "url", "says"),
    [
        ("POST", "/calibrators/rollback?modle=south", "'modle'; did you mean 'model'?"),
        ("POST", "/calibrators/0/activate?expcted=7", "'expcted'; did you mean 'expected'?"),
        (
            "POST",
            "/calibrators/0/activate?model=north&model=south",
            "several values of 'model': 'north', 'south'",
        ),
        ("POST", "/monitor/acknowledge?Model=south", "did you mean 'model'? The query string takes `model`."),
        ("POST", "/feedback?modle=south", "'modle'"),
        ("POST", "/calibrate?top_k=1&top_k=2", "several values of 'top_k'"),
        ("GET", "/refits?limt=3", "'limt'; did you mean 'limit'? The query string takes `limit`, "),
        ("GET", "/stats?modle=south", "'modle'"),
        ("DELETE", "/fits/none?modle=south", "'modle'"),
    ],
)
def test_parameters_that_nothing_reads_change_nothing(
    http: httpx.Client, method: str, url: str, says: str
) -> None:
    body = {"calibrate": {"logits": LOGITS.tolist()}, "feedback": {"items": [{"id": "none", "label": "1"}]}}
    before = http.get("/activations").json()
    answer = http.request(method, url, json=body.get(url[1:].partition("?")[0]))
    assert answer.status_code == 422
    assert says in answer.json()["detail"]
    assert http.get("/activations").json() == before


def test_the_version_that_is_expected_is_no_body(http: httpx.Client) -> None:
    answer = http.post("/calibrators/0/activate", json={"expected": 7})
    assert answer.status_code == 422
    assert "reads no body" in answer.json()["detail"]
    assert http.post("/calibrators/0/activate", json={}).is_success
    assert [
        http.get(url).status_code for url in ("/whoami?model=south", "/calibrators?model=south&limit=2")
    ] == [200] * 2


def test_a_model_has_its_own_classes_and_fits(http: httpx.Client) -> None:
    version = fit(http, 3, model="elsewhere")
    answer = http.post("/calibrate", params={"model": "elsewhere"}, json={"logits": [[1.0, 2.0, 3.0]]}).json()
    assert answer["calibrator"]["version"] == version
    (own,) = http.get("/fits", params={"model": "elsewhere"}).json()["fits"]
    assert http.get(f"/fits/{own['id']}", params={"model": "north"}).status_code == 404
    assert http.get(f"/fits/{own['id']}", params={"model": "elsewhere"}).json() == own
    assert http.post("/predict", params={"model": "elsewhere"}, json={"inputs": [{}]}).status_code == 404


def test_bounds_of_a_model_hold_for_requests_that_set_none(http: httpx.Client) -> None:
    def largest(**options: Any) -> float:
        body = {"logits": LOGITS.tolist(), "options": {"calibrator": 0, **options}}
        answer = http.post("/calibrate", params={"model": "south"}, json=body).json()
        probability: float = answer["predictions"][0]["top"][0]["probability"]
        return probability

    assert largest() == 0.6
    assert largest(bounds={}) > 0.6
    assert largest(bounds={"upper": 0.5}) == 0.5


def test_the_protocol_has_every_model(http: httpx.Client) -> None:
    index = http.post("/v2/repository/index").json()
    names = ["north", "north.calibrator", "south", "south.calibrator", "elsewhere.calibrator"]
    assert [one["name"] for one in index] == names
    for name in ("north", "south"):
        sent = {"name": "logits", "shape": [1, 10], "datatype": "FP64", "data": LOGITS.ravel().tolist()}
        body = {"inputs": [sent], "parameters": {"upper": 1.0}}
        answer = http.post(f"/v2/models/{name}.calibrator/infer", json=body).json()
        version, probabilities = active(http, name)
        assert answer["model_version"] == str(version)
        assert answer["outputs"][0]["data"] == probabilities
        assert str(version) in http.get(f"/v2/models/{name}").json()["versions"]
    missing = http.get("/v2/models/digits")
    assert missing.status_code == 404
    assert "the models are north, north.calibrator" in missing.json()["error"]


def test_metrics_and_statistics_are_told_apart(service: Service, http: httpx.Client) -> None:
    service.state.models["south"].telemetry.restarted("monitor")
    service.state.telemetry.restarted("keys")
    for _ in range(3):
        http.post("/calibrate", params={"model": "elsewhere"}, json={"logits": LOGITS.tolist()})
    lines = http.get("/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("boxcal_request_seconds_count")]
    refused = 'boxcal_request_seconds_count{model="elsewhere",route="/calibrate",status="422"} '
    assert [float(line.rpartition(" ")[2]) for line in counted if line.startswith(refused)] == [3.0]
    assert any('route="/metrics"' in line and "model=" not in line for line in counted)
    device = [line for line in lines if line.startswith("boxcal_device_seconds_total{")]
    assert [line.split('"')[1] for line in device] == ["north", "south", "elsewhere"]
    queues = [line.split("{")[1].split("}")[0] for line in lines if line.startswith("boxcal_queue_samples{")]
    assert queues == ['model="north"', 'model="south"', 'model="elsewhere"']
    counts = [line for line in lines if line.startswith("boxcal_background_restarts_total")]
    restarts = [line for line in counts if not line.endswith(" 0.0")]
    of_model = 'boxcal_background_restarts_total{model="south",task="monitor"} 1.0'
    assert restarts == ['boxcal_background_restarts_total{task="keys"} 1.0', of_model]
    assert sum(line.startswith("process_resident_memory_bytes ") for line in lines) == 1
    assert http.get("/stats", params={"model": "south"}).json()["memory_bytes"] > 0


def test_feedback_belongs_to_the_model_that_answered(http: httpx.Client) -> None:
    body = {"logits": LOGITS.tolist(), "options": {"feedback": True}}
    answer = http.post("/calibrate", params={"model": "south"}, json=body).json()
    labelled = {"items": [{"id": answer["predictions"][0]["id"], "label": 9}]}
    assert http.post("/feedback", params={"model": "south"}, json=labelled).json()["accepted"] == 1
    found = http.get("/monitor", params={"model": "elsewhere"}).json()
    assert found["labels"] == 0


def test_the_client_names_its_model(service: Service) -> None:
    with BoxcalClient(service.url, model="south") as south, BoxcalClient(service.url) as default:
        assert south.calibrate(LOGITS).model == south.model()["name"] == "south"
        assert default.calibrate(LOGITS).model == default.model()["name"] == "north"
        assert default.model()["models"] == ["north", "south", "elsewhere"]


OUTSIDE = "[a]\nmodel = 'logits:3'\n[b]\nmodel = 'logits:3'\nupper = 0.2"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("models", "reason"),
    [
        ("a=digits,b=onnx:nowhere.onnx", "The model file nowhere.onnx does not exist."),
        ("a=digits,b=torchvision:nothing", ".*nothing"),
        ("models.toml", "The upper bounds"),
    ],
)
async def test_a_model_that_cannot_be_served_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.toml").write_text(OUTSIDE)
    settings = Settings(data_dir=tmp_path / "data", model=models, device="cpu")
    with pytest.raises((BackboneError, BoxcalError), match=f"^The model b cannot be served: {reason}"):
        async with build(settings, Telemetry({})):
            raise AssertionError("it started")
