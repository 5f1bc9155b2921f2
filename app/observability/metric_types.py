"""Kinds of metrics that the library has not: what a request observes must cost next to nothing."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

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
