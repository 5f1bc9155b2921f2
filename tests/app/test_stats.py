"""The summary of the last 15 minutes: rates and quantiles of what came between two readings."""

import math

import orjson
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from boxcal.app.observability.stats import READINGS, Stats, minus, quantile, total


def metrics() -> tuple[CollectorRegistry, Histogram, Gauge, Counter]:
    """Make those metrics of the service that the test changes."""
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
