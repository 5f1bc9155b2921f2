"""Prometheus metrics of the service, exposed at `/metrics`.

Every label has a fixed set of values, so a client cannot create a series: routes are templates, and requests
that match no route share one label.
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
"""`expected_accuracy` gives each new prediction the weight 1/1000, after a plain mean of the first 1000."""


class Telemetry:
    """Metrics of the service. All methods are thread-safe.

    Parameters
    ----------
    statuses
        HTTP statuses that each route template declares.
    """

    def __init__(self, statuses: Mapping[str, Iterable[int]]) -> None:
        # Otherwise the library adds a `_created` series for every counter and histogram.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # memory, processor time and open files of this process
        self._request_seconds = Distribution(
            "boxcal_request_seconds",
            "Duration of a request in seconds, from its first byte to the last byte of its response.",
            SECONDS,
            ["route", "status"],
            registry=registry,
        )
        self._stage_seconds = Distribution(
            "boxcal_stage_seconds",
            "Duration of each stage of a prediction in seconds.",
            SECONDS,
            ["stage"],
            registry=registry,
        )
        self._batch_size = Distribution(
            "boxcal_batch_size", "Number of samples in a forward pass.", SIZES, registry=registry
        ).labels()
        self._queue_samples = Gauge(
            "boxcal_queue_samples", "Number of samples in the queue and in progress.", registry=registry
        )
        self._rejected = Counter(
            "boxcal_rejected",
            "Requests that were rejected or cancelled, by reason.",
            ["reason"],
            registry=registry,
        )
        self._bound_hits = Counter(
            "boxcal_bound_hits",
            "Class probabilities that are equal to a bound, by side.",
            ["side"],
            registry=registry,
        )
        self._bounds_relaxed = Counter(
            "boxcal_bounds_relaxed",
            "Predictions whose fitted bounds were relaxed to satisfy the bounds of the request.",
            registry=registry,
        )
        self._confidence = Distribution(
            "boxcal_confidence", "Largest probability of a prediction.", SHARES, registry=registry
        ).labels()
        self._expected_accuracy = Gauge(
            "boxcal_expected_accuracy",
            f"Exponential mean of the confidence (about {REMEMBERED} predictions): the expected accuracy.",
            registry=registry,
        )
        self._expected_accuracy.set_function(lambda: self._accuracy)
        self._calibrator_info = Gauge(
            "boxcal_calibrator_info",
            "The active calibrator: its version and method.",
            ["version", "method"],
            registry=registry,
        )
        self._fit_seconds = Histogram(
            "boxcal_fit_seconds",
            "Duration of successful fits in seconds, by requested method.",
            ["method"],
            buckets=FIT_SECONDS,
            registry=registry,
        )
        self._fits = Counter("boxcal_fits", "Fits that ended, by final state.", ["state"], registry=registry)
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
