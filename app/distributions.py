"""Histograms for the hot path: what `telemetry` counts several times in every request.

The client library's own take a lock for each of the numbers behind an observation and look its bucket up one
by one; that costs as much as checking a small request's options. The series are the same.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Cell:
    """One series of a `Distribution`; any thread may observe."""

    __slots__ = ("_bounds", "_counts", "_lock", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count one value."""
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._total += value

    def read(self) -> tuple[list[int], float]:
        """Give the cumulative counts up to each bound and beyond the last, and the sum of the values."""
        with self._lock:
            return list(accumulate(self._counts)), self._total


class Distribution(Collector):
    """A histogram.

    Parameters
    ----------
    name, documentation
        As they stand at `/metrics`.
    bounds
        Upper bounds of the buckets, ascending; one without end is added.
    labels
        Names of the labels.
    registry
        Where it is read.
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
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(bounds)
        self._names = [floatToGoString(bound) for bound in (*bounds, math.inf)]  # type: ignore[no-untyped-call]
        self._labels = tuple(labels)
        self._cells: dict[tuple[str, ...], Cell] = {}
        self._lock = threading.Lock()
        registry.register(self)

    def labels(self, *values: str) -> Cell:
        """Give the series with these values of the labels; from its first mention on it is shown."""
        with self._lock:
            return self._cells.setdefault(values, Cell(self._bounds))

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Give what was counted, to the library that writes it."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        with self._lock:
            cells = list(self._cells.items())
        for values, cell in cells:
            counts, total = cell.read()
            family.add_metric(values, list(zip(self._names, map(float, counts), strict=True)), total)
        yield family
