"""Metrics of all serving processes as one: each leaves its own in a file every second.

The supervisor adds the counts of a process that ended to one more file, so that a sum never falls because a
process was replaced.
"""

from __future__ import annotations

import asyncio
import math
import operator
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import orjson
from prometheus_client.core import Metric
from prometheus_client.samples import Sample

from boxcal.app.observability.stats import Collects

SAVE_SECONDS = 1.0
ADDED_GAUGES = frozenset(
    {
        "boxcal_queue_samples",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
    }
)
LARGEST_GAUGES = frozenset({"boxcal_registry_last_contact_seconds", "boxcal_calibrator_info"})
MEAN_GAUGE, MEAN_OF = "boxcal_expected_accuracy", "boxcal_confidence"
"""A gauge that is a mean over predictions, and the histogram that counts them."""
ENDED = "ended"
REMEMBERED = 16
"""Names of files whose counts were added last: a process may have read them just before."""
RESTARTS = "boxcal_process_restarts"

Samples = list[tuple[str, dict[str, str], float]]
"""Name, labels and value."""
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class SharedMetrics:
    """The metrics of this process together with those of its siblings.

    Counters and histograms are added, and so are the gauges of memory and queues; the expected accuracy is a
    mean. Of the others, those of this process are shown.
    """

    def __init__(self, registry: Collects, folder: Path) -> None:
        self._registry = registry
        self._folder = folder
        self._file = folder / f"{os.getpid()}-{time.monotonic_ns()}.json"

    async def run(self) -> None:
        """Leave the metrics every second until cancelled."""
        while True:
            await asyncio.to_thread(self.save)
            await asyncio.sleep(SAVE_SECONDS)

    def save(self) -> None:
        """Leave the metrics of this process; blocks."""
        _replace(self._file, _document(self._registry.collect()))

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of this process with those of the siblings added; blocks."""
        # The file of those that ended is read last: a process that ends meanwhile is in one of the two.
        found = {file.name: _read(file) for file in self._folder.glob("*.json") if file != self._file}
        ended = _read(self._folder / ENDED)
        others = [ended, *(one for name, one in found.items() if name not in ended.get("files", ()))]
        mine = list(self._registry.collect())
        means = _mean([_document(mine), *others])
        for metric in mine:
            values: Values = {}
            _join(values, ((one.name, one.labels, one.value) for one in metric.samples))
            if metric.name == MEAN_GAUGE:
                values |= means
            for other in others if metric.name != MEAN_GAUGE else ():
                for kind in ("counts", "gauges"):
                    largest = metric.name in LARGEST_GAUGES
                    _join(values, other.get(kind, {}).get(metric.name, ()), max if largest else operator.add)
            metric.samples = [Sample(name, dict(labels), value) for (name, labels), value in values.items()]
            yield metric


def _document(metrics: Iterable[Metric]) -> dict[str, dict[str, Samples]]:
    document: dict[str, dict[str, Samples]] = {"counts": {}, "gauges": {}}
    for metric in metrics:
        kind = "counts" if metric.type in ("counter", "histogram") else "gauges"
        if kind == "counts" or metric.name in ADDED_GAUGES | LARGEST_GAUGES | {MEAN_GAUGE}:
            document[kind][metric.name] = [(one.name, one.labels, one.value) for one in metric.samples]
    return document


def _mean(processes: Iterable[dict[str, Any]]) -> Values:
    """Return the means of the processes as one, of each model; none where no process has one."""
    # The supervisor needs no numpy.
    from boxcal.app.observability.telemetry import REMEMBERED as MOST  # noqa: PLC0415

    sums: Values = {}
    weights: Values = {}
    for process in processes:
        counts: Values = {}
        _join(counts, process.get("counts", {}).get(MEAN_OF, ()))
        for name, labels, value in process.get("gauges", {}).get(MEAN_GAUGE, ()):
            count = counts.get((f"{MEAN_OF}_count", tuple(sorted(labels.items()))), 0.0)
            if count and value is not None and not math.isnan(value):  # a file has None for NaN
                weight = min(count, MOST)
                _join(sums, [(name, labels, weight * value)])
                _join(weights, [(name, labels, weight)])
    return {key: total / weights[key] for key, total in sums.items()}


def keep_counts(folder: Path, process: int, restarts: int = 0) -> None:
    """Keep the counts of a process that has ended, and count that it was started again; blocks."""
    ended = _read(folder / ENDED)
    counts = ended.get("counts", {})
    files = list(folder.glob(f"{process}-*.json"))
    for added in [*(_read(file).get("counts", {}) for file in files), _restarts(restarts)]:
        for metric, samples in added.items():
            values: Values = {}
            _join(values, [*counts.get(metric, ()), *samples])
            counts[metric] = [(name, dict(labels), value) for (name, labels), value in values.items()]
    names = [*ended.get("files", ()), *(file.name for file in files)]
    _replace(folder / ENDED, {"counts": counts, "files": names[-REMEMBERED:]})
    for file in files:
        file.unlink()


def _restarts(count: int) -> dict[str, Samples]:
    return {RESTARTS: [(f"{RESTARTS}_total", {}, float(count))]}


def _join(
    values: Values, samples: Iterable[Any], join: Callable[[float, float], float] = operator.add
) -> None:
    for name, labels, value in samples:
        key = (name, tuple(sorted(labels.items())))
        values[key] = join(values[key], value) if key in values else value


def _read(file: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = orjson.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return document


def _replace(file: Path, document: Any) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(orjson.dumps(document))
    new.replace(file)
