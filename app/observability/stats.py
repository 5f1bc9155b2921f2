"""A summary of the last 15 minutes for people: `GET /stats`, from readings of the metrics every 5 s.

The metrics are read in a thread and the response is prepared there, so that a request costs next to nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import orjson
from prometheus_client.core import Metric

from boxcal.app.observability.supervised_task import beside

logger = logging.getLogger("boxcal")

SECONDS = 5.0
READINGS = 180
WINDOW = 6
"""Readings that the quantiles and rates of the summary look back: 30 s."""

ROUTES = ("/predict", "/calibrate")
STAGES = ("decode", "queue", "backbone", "calibrate")
FIRST_ERROR_STATUS = "400"

Buckets = dict[float, float]
"""Cumulative counts by upper bound."""


class Collects(Protocol):
    """What has metrics: the registry of a process, or those of all processes."""

    def collect(self) -> Iterable[Metric]: ...


@dataclass
class Reading:
    """The counters at one time."""

    at: float
    answered: Buckets = field(default_factory=dict)
    failed: float = 0.0
    stages: dict[str, Buckets] = field(default_factory=dict)
    batches: Buckets = field(default_factory=dict)
    confidence: Buckets = field(default_factory=dict)
    rejected: dict[str, float] = field(default_factory=dict)
    bound_hits: dict[str, float] = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)


class Stats:
    """Keeps the readings of 15 minutes and the response that shows them."""

    def __init__(self, registry: Collects, model: str | None = None) -> None:
        self._registry = registry
        self._model = model
        self._readings: deque[Reading] = deque(maxlen=READINGS + 1)
        self.response = b"{}"

    def read(self) -> None:
        """Read the metrics once and prepare the response; blocks for some milliseconds."""
        self._readings.append(read(self._registry.collect(), time.time(), self._model))
        self.response = orjson.dumps(self._summary())

    async def run(self) -> None:
        """Read every 5 s until cancelled; a failed reading is logged and the next one tried."""
        while True:
            try:
                await asyncio.to_thread(self.read)
            except Exception:
                logger.exception("The metrics could not be read for /stats")
            await asyncio.sleep(SECONDS)

    def _summary(self) -> dict[str, Any]:
        readings = list(self._readings)
        now, before = readings[-1], readings[max(0, len(readings) - 1 - WINDOW)]
        seconds = max(now.at - before.at, 1e-9)
        batches = minus(now.batches, before.batches)
        history = [_rates(first, second, 3) for first, second in pairwise(readings)]
        rates = _rates(before, now)
        return {
            "at": round(now.at, 1),
            "every_seconds": SECONDS,
            **rates,
            "stages_ms": {
                stage: [
                    _short(1000 * quantile(minus(counts, before.stages.get(stage, {})), share))
                    for share in (0.5, 0.95, 0.99)
                ]
                for stage, counts in now.stages.items()
            },
            "batches": total(batches),
            "median_batch": _short(quantile(batches, 0.5)),
            "queue_samples": now.values.get("boxcal_queue_samples", 0.0),
            "memory_bytes": now.values.get("process_resident_memory_bytes"),
            "cores": _short(
                (
                    now.values.get("process_cpu_seconds_total", 0.0)
                    - before.values.get("process_cpu_seconds_total", 0.0)
                )
                / seconds
            ),
            "expected_accuracy": _short(now.values.get("boxcal_expected_accuracy", math.nan), 4),
            "rejected": {reason: count for reason, count in now.rejected.items() if count},
            "bound_hits": now.bound_hits,
            "confidence": _steps(now.confidence),
            "history": {name: [point[name] for point in history] for name in rates},
        }


def read(metrics: Iterable[Metric], at: float, model: str | None = None) -> Reading:
    """Pick from the metrics what the summary needs."""
    reading = Reading(at)
    for name, labels, value in _samples(metrics, model):
        match name:
            case "boxcal_request_seconds_bucket" if labels["route"] in ROUTES:
                if labels["status"] < FIRST_ERROR_STATUS:
                    _add(reading.answered, labels, value)
            case "boxcal_request_seconds_count" if labels["route"] in ROUTES:
                if labels["status"] >= FIRST_ERROR_STATUS:
                    reading.failed += value
            case "boxcal_stage_seconds_bucket" if labels["stage"] in STAGES:
                _add(reading.stages.setdefault(labels["stage"], {}), labels, value)
            case "boxcal_batch_size_bucket":
                _add(reading.batches, labels, value)
            case "boxcal_confidence_bucket":
                _add(reading.confidence, labels, value)
            case "boxcal_rejected_total":
                reading.rejected[labels["reason"]] = value
            case "boxcal_bound_hits_total":
                reading.bound_hits[labels["side"]] = value
            case _ if not labels:
                reading.values[name] = value
    return reading


def _samples(metrics: Iterable[Metric], model: str | None) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Give the samples of the process and of a model, without its label; all if there is one model."""
    for metric in metrics:
        for sample in metric.samples:
            if model is None or metric.name.startswith("process_"):
                yield sample.name, sample.labels, sample.value
            elif sample.labels.get("model") == model:
                labels = {name: value for name, value in sample.labels.items() if name != "model"}
                yield sample.name, labels, sample.value


def _add(buckets: Buckets, labels: Mapping[str, str], value: float) -> None:
    bound = float(labels["le"])
    buckets[bound] = buckets.get(bound, 0.0) + value


def minus(now: Buckets, before: Buckets) -> Buckets:
    """Count what came between two readings."""
    return {bound: count - before.get(bound, 0.0) for bound, count in now.items()}


def total(buckets: Buckets) -> float:
    return max(buckets.values(), default=0.0)


def quantile(buckets: Buckets, share: float) -> float:
    """Interpolate a quantile in its bucket, as `histogram_quantile` of Prometheus does; nan of nothing."""
    count = total(buckets)
    if not count:
        return math.nan
    rank, low, below = share * count, 0.0, 0.0
    for bound, cumulative in sorted(buckets.items()):
        if cumulative >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / max(cumulative - below, 1e-12)
        low, below = bound, cumulative
    return low


def _rates(before: Reading, now: Reading, digits: int = 4) -> dict[str, float | None]:
    seconds = max(now.at - before.at, 1e-9)
    answered = minus(now.answered, before.answered)
    return {
        "requests_per_second": _short(total(answered) / seconds, digits),
        "failed_per_second": _short((now.failed - before.failed) / seconds, digits),
        "p50_ms": _short(1000 * quantile(answered, 0.50), digits),
        "p99_ms": _short(1000 * quantile(answered, 0.99), digits),
    }


def _steps(buckets: Buckets) -> list[list[float]]:
    """Count each bucket by itself: pairs of upper bound and count."""
    pairs, below = [], 0.0
    for bound, cumulative in sorted(buckets.items()):
        if not math.isinf(bound):
            pairs.append([bound, cumulative - below])
            below = cumulative
    return pairs


def _short(value: float, digits: int = 4) -> float | None:
    """Round to significant digits; None of nan, which JSON does not have."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short == int(short) else short


@asynccontextmanager
async def keep_reading(stats: Stats) -> AsyncIterator[Stats]:
    """Read the metrics for as long as the service runs."""
    async with beside(stats.run(), "stats"):
        yield stats
