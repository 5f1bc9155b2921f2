"""What the service measures about itself, as Prometheus reads it at `/metrics`.

Every label takes its values from a closed set that is known at the start, so nothing a client sends can make
a new series: routes are templates, and requests that match none share one name.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from boxcal.app.distributions import Distribution

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
FIT_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
STAGES = ("decode", "queue", "backbone", "calibrate", "total")
REJECTIONS = ("queue-full", "deadline-exceeded", "disconnected", "body-too-large", "image-too-large")
FIT_STATES = ("succeeded", "failed", "cancelled", "interrupted")
UNMATCHED = "unmatched"
REMEMBERED = 1000
"""Over how many answers `expected_accuracy` is averaged."""


class Telemetry:
    """The service's metrics; its methods may be called from any thread.

    Parameters
    ----------
    statuses
        The statuses that each route template declares.
    """

    def __init__(self, statuses: Mapping[str, Iterable[int]]) -> None:
        # The library would add a series with the time of creation beside every counter and histogram.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # memory, processor time and open files of this process
        self._request_seconds = Distribution(
            "boxcal_request_seconds",
            "Time from the first byte of a request to the last of its answer.",
            SECONDS,
            ["route", "status"],
            registry=registry,
        )
        self._stage_seconds = Distribution(
            "boxcal_stage_seconds",
            "Time that a prediction spends in each stage.",
            SECONDS,
            ["stage"],
            registry=registry,
        )
        self._batch_size = Distribution(
            "boxcal_batch_size", "Samples in one forward pass.", SIZES, registry=registry
        ).labels()
        self._queue_samples = Gauge(
            "boxcal_queue_samples", "Samples being decoded, waiting or in work.", registry=registry
        )
        self._rejected = Counter(
            "boxcal_rejected", "Requests refused or given up.", ["reason"], registry=registry
        )
        self._bound_hits = Counter(
            "boxcal_bound_hits", "Classes whose probability a bound holds.", ["side"], registry=registry
        )
        self._bounds_relaxed = Counter(
            "boxcal_bounds_relaxed",
            "Predictions for which fitted bounds had to yield to the request's.",
            registry=registry,
        )
        self._confidence = Distribution(
            "boxcal_confidence", "The largest probability of a prediction.", SHARES, registry=registry
        ).labels()
        self._expected_accuracy = Gauge(
            "boxcal_expected_accuracy",
            f"Mean confidence of the last {REMEMBERED} predictions: the accuracy they promise.",
            registry=registry,
        )
        self._expected_accuracy.set_function(lambda: self._accuracy)
        self._calibrator_info = Gauge(
            "boxcal_calibrator_info", "The active calibrator.", ["version", "method"], registry=registry
        )
        self._fit_seconds = Histogram(
            "boxcal_fit_seconds",
            "How long fits took, by the method asked for.",
            ["method"],
            buckets=FIT_SECONDS,
            registry=registry,
        )
        self._fits = Counter("boxcal_fits", "Fits that ended, by how.", ["state"], registry=registry)
        self._lock = threading.Lock()
        self._answers = 0
        self._accuracy = 0.0
        self._requests = {
            (route, status): self._request_seconds.labels(route, str(status))
            for route, codes in statuses.items()
            for status in codes
        }
        self._stages = {stage: self._stage_seconds.labels(stage) for stage in STAGES}
        self._sides = {side: self._bound_hits.labels(side) for side in ("lower", "upper")}
        for reason in REJECTIONS:
            self._rejected.labels(reason)
        for state in FIT_STATES:
            self._fits.labels(state)

    def watch_queue(self, held: Callable[[], int]) -> None:
        """Read the gauge of the queue from the batcher itself."""
        self._queue_samples.set_function(held)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count one request, by the template of its route."""
        child = self._requests.get((route, status))
        if child is None:
            child = self._requests[route, status] = self._request_seconds.labels(route, str(status))
        child.observe(seconds)

    def stages(self, seconds: Mapping[str, float]) -> None:
        """Count how long a prediction spent in each stage it went through."""
        for stage, value in seconds.items():
            self._stages[stage].observe(value)

    def batch(self, samples: int) -> None:
        """Count one forward pass."""
        self._batch_size.observe(samples)

    def rejected(self, reason: str) -> None:
        """Count a request that was refused or given up, where the reason is one that is counted."""
        if reason in REJECTIONS:
            self._rejected.labels(reason).inc()

    def answered(self, confidences: Iterable[float], lower_hits: int, upper_hits: int, relaxed: int) -> None:
        """Count the predictions of one answer: their confidences, and what bounds did to them."""
        total, count = 0.0, 0
        for confidence in confidences:
            self._confidence.observe(confidence)
            total += confidence
            count += 1
        if lower_hits:
            self._sides["lower"].inc(lower_hits)
        if upper_hits:
            self._sides["upper"].inc(upper_hits)
        if relaxed:
            self._bounds_relaxed.inc(relaxed)
        with self._lock:
            self._answers = min(self._answers + count, max(REMEMBERED, count))
            self._accuracy += (total - count * self._accuracy) / max(self._answers, 1)

    def calibrator_active(self, version: int, method: str) -> None:
        """Name the active calibrator; the one before it is no longer shown."""
        with self._lock:
            self._calibrator_info.clear()
            self._calibrator_info.labels(str(version), method).set(1)

    def fit_ended(self, state: str, method: str, seconds: float) -> None:
        """Count a fit that is over."""
        self._fits.labels(state).inc()
        if state == "succeeded":
            self._fit_seconds.labels(method).observe(seconds)

    def exposition(self) -> bytes:
        """Write every metric in Prometheus' text format."""
        return generate_latest(self.registry)
