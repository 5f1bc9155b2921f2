"""Prometheus metrics of the service, exposed at `/metrics`.

Every label has a fixed set of values, so a client cannot create a series: routes are templates, and requests
that match no route share one label. Of several models each counts its own, told apart by the label `model`;
with one model no series has that label. What every request observes has its own kinds of metrics here,
because those of the library cost more.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from boxcal.app.schemas.predictions import STAGES

KEPT_VALUES = 256
"""A series counts its values when it has so many."""


class FastHistogramSeries:
    """One series of a `FastHistogram`; any thread may observe.

    Values are kept, without a lock, and counted when there are some hundred or when they are read.
    """

    __slots__ = ("_bounds", "_counts", "_lock", "_total", "_values")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._values: list[float] = []
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        values = self._values
        values.append(value)
        if len(values) >= KEPT_VALUES:
            with self._lock:
                self._count()

    def _count(self) -> None:
        values = self._values.copy()  # other threads may append to the list meanwhile
        del self._values[: len(values)]
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1
        self._total += sum(values)

    def observe_all(self, values: NDArray[np.float64], total: float) -> None:
        """Count values (N,), whose sum is `total`."""
        places = np.searchsorted(self._bounds, values)
        counts = np.bincount(places, minlength=len(self._counts)).tolist()
        with self._lock:
            self._counts = [kept + more for kept, more in zip(self._counts, counts, strict=True)]
            self._total += total

    def read(self) -> tuple[list[int], float]:
        """Return the cumulative counts up to each bound and beyond the last, and the sum of the values."""
        with self._lock:
            self._count()
            return list(accumulate(self._counts)), self._total


class FastHistogram(Collector):
    """A histogram with the series of `prometheus_client.Histogram`, which takes a lock for each number.

    A request observes five values; docs/benchmarks.md has what the library's histogram costs. Counts and sums
    exist from the start for all declared labels, buckets once there is something in them: of the many errors
    that each route may answer with, a process sees few.
    """

    def __init__(
        self,
        name: str,
        documentation: str,
        bounds: Sequence[float],
        labels: Sequence[str] = (),
        *,
        registry: CollectorRegistry,
    ) -> None:
        self._family = name, documentation, tuple(labels)
        self._bounds = tuple(bounds)
        self._names = [floatToGoString(bound) for bound in (*bounds, math.inf)]  # type: ignore[no-untyped-call]
        self._series: dict[tuple[str, ...], FastHistogramSeries] = {}
        self._lock = threading.Lock()
        registry.register(self)

    def labels(self, *values: str) -> FastHistogramSeries:
        """Return the series with these values of the labels; it is exposed from the first call on."""
        with self._lock:
            return self._series.setdefault(values, FastHistogramSeries(self._bounds))

    def collect(self) -> Iterable[HistogramMetricFamily]:
        name, documentation, labels = self._family
        family = HistogramMetricFamily(name, documentation, labels=labels)
        with self._lock:
            series = list(self._series.items())
        for values, one in series:
            counts, total = one.read()
            if labels and not counts[-1]:
                named = dict(zip(labels, values, strict=True))
                family.add_sample(f"{name}_count", named, 0.0)
                family.add_sample(f"{name}_sum", named, 0.0)
                continue
            family.add_metric(values, list(zip(self._names, map(float, counts), strict=True)), total)
        yield family


class ReadCounter(Collector):
    """A counter whose value is read from what counts it, when metrics are asked for."""

    def __init__(self, name: str, documentation: str, *, registry: CollectorRegistry) -> None:
        self._family = name, documentation
        self.read: Callable[[], float] = lambda: 0.0
        registry.register(self)

    def collect(self) -> Iterable[CounterMetricFamily]:
        yield CounterMetricFamily(*self._family, value=self.read())


SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
FIT_SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
REJECTIONS = (
    "queue-full",
    "deadline-exceeded",
    "client-timeout",
    "disconnected",
    "body-too-large",
    "image-too-large",
    "request-too-large",
    "backbone-failed",
    "api-key-required",
    "invalid-api-key",
    "api-key-expired",
    "insufficient-scope",
    "rate-limited",
    "concurrency-limited",
)
FEEDBACK_RESULTS = (
    "predictions",
    "dropped",
    "accepted",
    "duplicates",
    "conflicts",
    "unknown",
    "expired",
    "malformed",
)
FIT_STATES = ("succeeded", "failed", "cancelled", "interrupted")
BACKGROUND_TASKS = ("follower", "keys", "feedback", "monitor", "webhook", "memory", "metrics")
ALARMS = ("strict", "material")
DELIVERIES = ("delivered", "failed")
UNMATCHED = "unmatched"
REMEMBERED = 1000
"""`expected_accuracy` gives each new prediction the weight 1/1000, after a plain mean of the first 1000."""


class Telemetry:
    """Metrics of the service. All methods are thread-safe."""

    def __init__(self, statuses: Mapping[str, Iterable[int]]) -> None:
        self._statuses = statuses
        # Otherwise the library adds a `_created` series for every counter and histogram.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)  # memory, processor time and open files of this process
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(FastHistogram, registry=registry)
        self._request_seconds = histogram(
            "boxcal_request_seconds",
            "Duration of a request in seconds, from its first byte to the last byte of its response.",
            SECONDS,
            ["route", "status"],
        )
        self._stage_seconds = histogram(
            "boxcal_stage_seconds", "Duration of each stage of a prediction in seconds.", SECONDS, ["stage"]
        )
        self._batch_size = histogram(
            "boxcal_batch_size", "Number of samples in a forward pass.", SIZES
        ).labels()
        self._device_seconds = ReadCounter(
            "boxcal_device_seconds",
            "Duration of all forward passes in seconds; the models of a service share a device by it.",
            registry=registry,
        )
        self._queue_samples = gauge("boxcal_queue_samples", "Number of samples in the queue and in progress.")
        self._rejected = counter(
            "boxcal_rejected", "Requests that were rejected or cancelled, by reason.", ["reason"]
        )
        self._bound_hits = counter(
            "boxcal_bound_hits", "Class probabilities that are equal to a bound, by side.", ["side"]
        )
        self._bounds_relaxed = counter(
            "boxcal_bounds_relaxed",
            "Predictions whose fitted bounds were relaxed to satisfy the bounds of the request.",
        )
        self._confidence = histogram(
            "boxcal_confidence", "Largest probability of a prediction.", SHARES
        ).labels()
        gauge(
            "boxcal_expected_accuracy",
            "Expected share of right answers: by labels where there are at least 50, otherwise the mean "
            f"confidence of about {REMEMBERED} predictions, corrected by the validation data; NaN without "
            "either.",
        ).set_function(self._expected)
        self._interval = {
            side: gauge(
                f"boxcal_expected_accuracy_{side}",
                f"The {side} end of the 95 % interval of the expected accuracy; NaN without labels.",
            )
            for side in ("low", "high")
        }
        for end in self._interval.values():
            end.set(math.nan)
        self._log_evidence = gauge(
            "boxcal_calibration_log_evidence",
            "Natural logarithm of the evidence against the calibration of the active calibrator, by test.",
            ["test"],
        )
        self._alarms = gauge(
            "boxcal_calibration_alarm",
            "Whether the test of calibration has raised an alarm: 1 until it is acknowledged or another "
            "calibrator is active.",
            ["test"],
        )
        self._recoverable = gauge(
            "boxcal_recoverable_nll",
            "NLL in nats a label that a recalibration would recover, since the start of the change.",
        )
        self._monitored_labels = gauge(
            "boxcal_monitored_labels", "Labels of the active calibrator that the monitor has tested."
        )
        counter(
            "boxcal_process_restarts",
            "Serving processes of `BOXCAL_WORKERS` that ended or hung, and were started again.",
        )
        self._deliveries = counter("boxcal_webhook_deliveries", "Events sent to the webhook.", ["result"])
        self._calibrator_info = gauge(
            "boxcal_calibrator_info",
            "The active calibrator: its version and method.",
            ["version", "method"],
        )
        self._fit_seconds = Histogram(
            "boxcal_fit_seconds",
            "Duration of successful fits in seconds, by requested method.",
            ["method"],
            buckets=FIT_SECONDS,
            registry=registry,
        )
        self._fits = counter("boxcal_fits", "Fits that ended, by final state.", ["state"])
        self._registry_answer_age = gauge(
            "boxcal_registry_last_contact_seconds",
            "Seconds since the database of the registry last answered.",
        )
        self._pauses = histogram(
            "boxcal_event_loop_pause_seconds",
            "By how many seconds a callback that the event loop runs every 50 ms was late.",
            SECONDS,
        ).labels()
        self._restarts = counter(
            "boxcal_background_restarts", "Background tasks that failed and were started again.", ["task"]
        )
        self._feedback = counter(
            "boxcal_feedback",
            "Predictions kept for feedback or dropped, and items of feedback by what became of them.",
            ["result"],
        )
        self._labelled_accuracy: float | None = None
        self._validation_gap = 0.0
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
        first_series: tuple[tuple[Counter | Gauge, tuple[str, ...]], ...] = (
            (self._rejected, REJECTIONS),
            (self._log_evidence, ALARMS),
            (self._alarms, ALARMS),
            (self._deliveries, DELIVERIES),
            (self._fits, FIT_STATES),
            (self._restarts, BACKGROUND_TASKS),
            (self._feedback, FEEDBACK_RESULTS),
        )
        for metric, values in first_series:
            for value in values:
                metric.labels(value)  # exposed from the start, at 0

    def of_model(self, routes: Iterable[str]) -> Telemetry:
        """Return the metrics of one of several models; the series of these routes exist from the start."""
        return Telemetry({route: self._statuses[route] for route in routes if route in self._statuses})

    def watch_queue(self, held: Callable[[], int]) -> None:
        """Read the gauge of the queue from the batcher itself."""
        self._queue_samples.set_function(held)

    def watch_device(self, seconds: Callable[[], float]) -> None:
        """Read the time of forward passes from the batcher itself."""
        self._device_seconds.read = seconds

    def watch_registry(self, seconds_since_answer: Callable[[], float]) -> None:
        """Read how long the registry has not answered from its database."""
        self._registry_answer_age.set_function(seconds_since_answer)

    def paused(self, seconds: float) -> None:
        """Count for how long the event loop did not run; called every 50 ms, mostly with nearly 0."""
        self._pauses.observe(seconds)

    def restarted(self, task: str) -> None:
        """Count a background task that failed."""
        self._restarts.labels(task).inc()

    def feedback(self, result: str, count: int) -> None:
        """Count predictions kept, or items of feedback."""
        if count:
            self._feedback.labels(result).inc(count)

    def monitored(self, document: Mapping[str, Any]) -> None:
        """Show what the monitor found."""
        for test in ALARMS:
            alarm = document["alarms"][test]
            self._alarms.labels(test).set(alarm["alarm"])
            self._log_evidence.labels(test).set(alarm["log_evidence"])
        self._recoverable.set(document["diagnosis"]["recoverable_nll"])
        self._monitored_labels.set(document["labels"])
        accuracy = document["expected_accuracy"]
        by_labels = accuracy is not None and accuracy["basis"] == "labels"
        for side, end in self._interval.items():
            end.set(accuracy[side] if by_labels else math.nan)
        with self._lock:
            self._labelled_accuracy = accuracy["value"] if by_labels else None
            self._validation_gap = document["validation_gap"]

    def _expected(self) -> float:
        if self._labelled_accuracy is not None:
            return self._labelled_accuracy
        if not self._answers:
            return math.nan
        return min(1.0, max(0.0, self._accuracy + self._validation_gap))

    def delivered(self, result: str) -> None:
        """Count an event sent to the webhook."""
        self._deliveries.labels(result).inc()

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

    def answered(
        self, confidences: NDArray[np.float64], lower_hits: int, upper_hits: int, relaxed: int
    ) -> None:
        """Count the predictions of one answer: their confidences (N,), and what bounds did to them."""
        count = len(confidences)
        if count == 1:
            total = confidences.item()
            self._confidence.observe(total)
        else:
            total = confidences.sum().item()
            self._confidence.observe_all(confidences, total)
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


OF_SERVICE = (
    "process_",
    "boxcal_process_",
    "boxcal_registry_",
    "boxcal_event_loop_",
)
"""Beginnings of the names of metrics that a model does not have."""
OF_BOTH = ("boxcal_request_seconds", "boxcal_rejected", "boxcal_background_restarts")
"""Requests that are for no model, such as health checks, and tasks of the service have no label."""


class MetricsOfModels:
    """The metrics of the service and of its models."""

    def __init__(self, service: Telemetry, models: Mapping[str, Telemetry]) -> None:
        self._service = service
        self._models = models

    def collect(self) -> Iterable[Metric]:
        """Return the metrics, each once, with the series of all models."""
        found: dict[str, Metric] = {}
        for metric in self._service.registry.collect():
            if not metric.name.startswith((*OF_SERVICE, *OF_BOTH)):
                metric.samples = []
            found[metric.name] = metric
        for name, telemetry in self._models.items():
            for metric in telemetry.registry.collect():
                if not metric.name.startswith(OF_SERVICE):
                    found[metric.name].samples += [
                        sample._replace(labels={**sample.labels, "model": name}) for sample in metric.samples
                    ]
        return found.values()
