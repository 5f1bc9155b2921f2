"""`/metrics`: the series that were promised, whatever clients send; `/stats`; memory is returned."""

from __future__ import annotations

import asyncio
import math
import random
import re
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import Receive, Scope, Send

from boxcal.app.http import health
from boxcal.app.main import create_app
from boxcal.app.observability.stats import READINGS, Stats, minus, quantile, total
from boxcal.app.observability.supervised_task import FreeMemory, resident_bytes
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.settings.service import Settings
from boxcal.models.digits_data import Digits
from tests.app.running import Service

PROMISED = """
    background_restarts_total event_loop_pause_seconds process_restarts_total
    registry_last_contact_seconds request_seconds stage_seconds batch_size
    device_seconds_total queue_samples feedback_total expected_accuracy_low
    expected_accuracy_high calibration_log_evidence calibration_alarm recoverable_nll
    monitored_labels webhook_deliveries_total rejected_total bound_hits_total
    bounds_relaxed_total confidence expected_accuracy calibrator_info fit_seconds fits_total
"""


def series(exposition: str) -> set[str]:
    return {line.rsplit(" ", 1)[0] for line in exposition.splitlines() if not line.startswith("#")}


def test_the_series_are_those_promised(http: httpx.Client, digits: Digits) -> None:
    http.post("/predict", content=digits.png(0), headers={"content-type": "image/png"})
    text = http.get("/metrics").text
    named = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert {name for name in named if not name.startswith("process_")} == {
        f"boxcal_{name}" for name in PROMISED.split()
    }
    buckets = re.findall(r'boxcal_stage_seconds_bucket\{le="([^"]+)",stage="backbone"\}', text)
    assert buckets[0] == "0.0005"
    assert buckets[-2:] == ["10.0", "+Inf"]
    stages = set(re.findall(r'boxcal_stage_seconds_count\{stage="(\w+)"\}', text))
    assert stages == {"decode", "queue", "backbone", "calibrate", "total"}
    active = http.get("/health/ready").json()["calibrator"]  # other tests may have activated one
    shown = re.findall(r'^boxcal_calibrator_info\{method="\w+",version="(\d+)"\} 1.0$', text, re.MULTILINE)
    assert shown == [str(active)]


def test_metrics_are_written_beside_the_event_loop(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def recorded(collected: CollectorRegistry) -> bytes:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        written.append(collected)
        return generate_latest(collected)

    monkeypatch.setattr(health, "generate_latest", recorded)
    assert "boxcal_request_seconds" in http.get("/metrics").text
    assert len(written) == 1


def test_buckets_are_exposed_once_something_is_in_them() -> None:
    telemetry = Telemetry({"/predict": {200, 503}})
    new = generate_latest(telemetry.registry).decode()
    assert 'boxcal_request_seconds_count{route="/predict",status="503"} 0.0' in new
    assert "boxcal_request_seconds_bucket" not in new
    telemetry.request("/predict", 200, 0.3)
    buckets = re.findall(
        r"^boxcal_request_seconds_bucket\S+ \S+", generate_latest(telemetry.registry).decode(), re.MULTILINE
    )
    assert len(buckets) == 15
    assert buckets[-1] == 'boxcal_request_seconds_bucket{le="+Inf",route="/predict",status="200"} 1.0'


def test_a_prediction_is_counted(service: Service, http: httpx.Client, digits: Digits) -> None:
    value = service.state.telemetry.registry.get_sample_value

    def counts() -> list[float | None]:
        return [
            value("boxcal_request_seconds_count", {"route": "/predict", "status": "200"}),
            value("boxcal_stage_seconds_count", {"stage": "backbone"}),
            value("boxcal_confidence_count"),
            value("boxcal_bound_hits_total", {"side": "upper"}),
        ]

    before = counts()
    answer = http.post("/predict?upper=0.4", content=digits.png(0), headers={"content-type": "image/png"})
    hits = sum(entry["bound"] == "upper" for entry in answer.json()["predictions"][0]["top"])
    assert hits >= 1
    assert counts() == [(count or 0) + step for count, step in zip(before, (1, 1, 1, hits), strict=True)]


def test_expected_accuracy_is_the_mean_confidence_of_recent_answers() -> None:
    telemetry = Telemetry({})
    value = telemetry.registry.get_sample_value
    assert math.isnan(value("boxcal_expected_accuracy") or 0.0)
    telemetry.answered(np.array([0.5]), 0, 0, 0)
    telemetry.answered(np.array([0.7, 0.9]), 0, 0, 0)
    assert value("boxcal_expected_accuracy") == pytest.approx(0.7)
    telemetry.answered(np.full(30_000, 0.25), 0, 0, 0)
    assert value("boxcal_expected_accuracy") == pytest.approx(0.25, abs=0.001)


@pytest.mark.anyio
async def test_random_requests_add_no_series(tmp_path: Path, digits: Digits) -> None:
    rng = random.Random(0)

    def word() -> str:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789-_.~%/", k=rng.randint(1, 12)))

    def kind() -> str:
        known = ["application/json", "image/png", "application/x-npy", "text/plain", "multipart/form-data"]
        return rng.choice([*known, word()])

    bodies = [b"", b"{", b'{"logits": [[1]]}', b'{"logits": [[0,1,2,3,4,5,6,7,8,9]]}', b"\x93NUMPY"]
    bodies += [digits.png(0), digits.png(1)[:50], b'{"inputs": [{}]}', b"\xff" * 100]
    paths = ["/predict", "/calibrate", "/health/live", "/health/ready", "/openapi.json", "/calibrators"]

    async def some(client: httpx.AsyncClient, count: int) -> None:
        for _ in range(count):
            path = rng.choice(paths) if rng.random() < 0.6 else "/" + word()
            if rng.random() < 0.3:
                path += f"?{word()}={word()}" if rng.random() < 0.5 else f"?top_k={rng.randint(-1, 3)}"
            method = rng.choice(["POST", "POST", "GET", "DELETE", "PUT", "HEAD", "OPTIONS", "BREW"])
            content, content_type = rng.choice(bodies), kind()
            if rng.random() < 0.2:
                method, path = "POST", "/calibrate"
                content, content_type = b'{"logits": [[0,1,2,3,4,5,6,7,8,9]]}', "application/json"
            headers = {"content-type": content_type, word(): "x"}
            await client.request(method, path, content=content, headers=headers)

    app = create_app(Settings(data_dir=tmp_path))
    async with app.router.lifespan_context(app) as held:

        async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
            await app({**scope, "state": dict(held or {})}, receive, send)

        transport = httpx.ASGITransport(app=with_state, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            before = series((await client.get("/metrics")).text)
            await asyncio.gather(*(some(client, 150) for _ in range(8)))
            text = (await client.get("/metrics")).text
    assert {one for one in series(text) if "_bucket{" not in one} == {
        one for one in before if "_bucket{" not in one
    }
    answered = re.findall(r'^boxcal_request_seconds_count\{.*status="(\d+)"\} ([\d.]+)$', text, re.MULTILINE)
    assert sum(float(count) for _, count in answered) > 1_100
    assert sum(float(count) for status, count in answered if status == "200") > 100
    assert not any(float(count) for status, count in answered if status == "500")


BLOCK, COUNT = 100_000, 1000


def blocks() -> list[bytearray]:
    """Blocks below the size that glibc maps by itself."""
    return [bytearray(BLOCK) for _ in range(COUNT)]


def test_what_is_free_below_a_block_in_use_is_returned() -> None:
    memory = FreeMemory()
    memory.give_back()
    for _ in range(2):
        *others, last = blocks()
        held = resident_bytes()
        assert memory.give_back() < 0.2 * BLOCK * COUNT  # all of it is in use
        del others
        assert memory.give_back() > 0.8 * BLOCK * COUNT
        assert resident_bytes() < held - 0.8 * BLOCK * COUNT
        assert len(last) == BLOCK


def test_other_allocators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    assert FreeMemory().give_back() == 0


def metrics() -> tuple[CollectorRegistry, Histogram, Gauge, Counter]:
    registry = CollectorRegistry()
    seconds = Histogram(
        "boxcal_request_seconds", "s", ["route", "status"], buckets=(0.01, 0.1, 1.0), registry=registry
    )
    queue = Gauge("boxcal_queue_samples", "n", registry=registry)
    rejected = Counter("boxcal_rejected", "n", ["reason"], registry=registry)
    return registry, seconds, queue, rejected


def test_rates_and_quantiles_are_of_the_requests_between_two_readings() -> None:
    registry, seconds, queue, rejected = metrics()
    stats = Stats(registry)
    seconds.labels("/predict", "200").observe(0.5)
    stats.read()
    for _ in range(99):
        seconds.labels("/predict", "200").observe(0.005)
    seconds.labels("/calibrate", "200").observe(0.05)
    seconds.labels("/calibrate", "503").observe(0.001)
    seconds.labels("/metrics", "200").observe(0.9)
    rejected.labels("queue-full").inc()
    queue.set(7)
    stats.read()
    document = orjson.loads(stats.response)
    assert document["p50_ms"] == pytest.approx(1000 * 0.01 * 50 / 99, rel=1e-3)
    assert 9.9 <= document["p99_ms"] <= 10.0
    assert document["requests_per_second"] > 0
    ratio = document["failed_per_second"] / document["requests_per_second"]
    assert ratio == pytest.approx(0.01, rel=0.01)
    assert document["queue_samples"] == 7
    assert document["rejected"] == {"queue-full": 1}
    assert len(document["history"]["p50_ms"]) == 1


def test_the_response_stays_below_4_kb_over_a_full_history() -> None:
    registry, seconds, _, _ = metrics()
    stats = Stats(registry)
    for n in range(READINGS + 20):
        for _ in range(1 + n % 7):
            seconds.labels("/predict", "200").observe(0.0123 * (1 + n % 5))
        stats.read()
    assert len(orjson.loads(stats.response)["history"]["p99_ms"]) == READINGS
    assert len(stats.response) <= 4096


def test_quantiles_interpolate_as_prometheus_does() -> None:
    buckets = {0.1: 10.0, 0.5: 10.0, 1.0: 20.0, math.inf: 20.0}
    assert quantile(buckets, 0.25) == pytest.approx(0.05)
    assert quantile(buckets, 0.75) == pytest.approx(0.75)
    assert quantile({1.0: 0.0, math.inf: 3.0}, 0.5) == 1.0
    assert math.isnan(quantile({}, 0.5))
    assert total(minus(buckets, {0.1: 5.0, 0.5: 5.0, 1.0: 15.0, math.inf: 15.0})) == 5.0
