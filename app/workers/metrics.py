"""Metrics of all serving processes as one: each leaves its own in a file every second.

A process that ended leaves its last counts behind, so that a sum never falls because one was replaced.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson
from prometheus_client.core import Metric

from boxcal.app.observability.stats import Collects

SAVE_SECONDS = 1.0
MAX_ENDED = 8
"""Files of ended processes, beyond which they are joined into one."""
ADDED_GAUGES = frozenset(
    {
        "boxcal_queue_samples",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
    }
)
LARGEST_GAUGES = frozenset({"boxcal_registry_last_contact_seconds", "boxcal_calibrator_info"})
JOINED = "ended.json"

Key = tuple[str, tuple[tuple[str, str], ...]]
Values = dict[Key, float]


class SharedMetrics:
    """The metrics of this process together with those of its siblings.

    Counters and histograms are added, and so are the gauges of memory and queues; of the others, those of
    this process are shown.

    Parameters
    ----------
    registry
        The metrics of this process.
    folder
        Where every process leaves its own.
    """

    def __init__(self, registry: Collects, folder: Path) -> None:
        self._registry = registry
        self._folder = folder
        self._file = folder / f"{os.getpid()}.json"

    async def run(self) -> None:
        """Leave the metrics every second until cancelled."""
        while True:
            await asyncio.to_thread(self.save)
            await asyncio.sleep(SAVE_SECONDS)

    def save(self) -> None:
        """Leave the metrics of this process; blocks."""
        document = [
            [metric.type, [[sample.name, sample.labels, sample.value] for sample in metric.samples]]
            for metric in self._registry.collect()
        ]
        _replace(self._file, document)

    def collect(self) -> Iterable[Metric]:
        """Return the metrics of this process with those of the siblings added; blocks."""
        counts, added, largest = self._siblings()
        for metric in self._registry.collect():
            samples = metric.samples
            if metric.type in ("counter", "histogram"):
                names = {f"{metric.name}_bucket"} if metric.type == "histogram" else set()
                metric.samples = _joined(samples, counts, lambda one, other: one + other, names)
            elif metric.name in ADDED_GAUGES:
                metric.samples = _joined(samples, added, lambda one, other: one + other)
            elif metric.name in LARGEST_GAUGES:
                metric.samples = _joined(samples, largest, max)
            yield metric

    def _siblings(self) -> tuple[Values, Values, Values]:
        counts: Values = {}
        added: Values = {}
        largest: Values = {}
        with _locked(self._folder, fcntl.LOCK_SH):
            documents = [
                (_is_alive(file), _read(file)) for file in self._folder.glob("*.json") if file != self._file
            ]
        for is_alive, document in documents:
            for kind, samples in document:
                for name, labels, value in samples:
                    key = (name, tuple(sorted(labels.items())))
                    if kind in ("counter", "histogram"):
                        counts[key] = counts.get(key, 0.0) + value
                    elif is_alive and name in ADDED_GAUGES:
                        added[key] = added.get(key, 0.0) + value
                    elif is_alive and name in LARGEST_GAUGES:
                        largest[key] = max(largest.get(key, value), value)
        return counts, added, largest


def join_ended(folder: Path) -> None:
    """Join the files of ended processes into one where there are many; blocks."""
    with _locked(folder, fcntl.LOCK_EX):
        ended = [file for file in folder.glob("*.json") if not _is_alive(file)]
        if len(ended) <= MAX_ENDED:
            return
        totals: dict[Key, tuple[str, float]] = {}
        for file in ended:
            for kind, samples in _read(file):
                for name, labels, value in samples:
                    if kind in ("counter", "histogram"):
                        key = (name, tuple(sorted(labels.items())))
                        totals[key] = (kind, totals.get(key, (kind, 0.0))[1] + value)
        _replace(
            folder / JOINED,
            [[kind, [[name, dict(labels), value]]] for (name, labels), (kind, value) in totals.items()],
        )
        for file in ended:
            if file.name != JOINED:
                file.unlink()


def _joined(samples: list[Any], others: Values, join: Any, names: Set[str] = frozenset()) -> list[Any]:
    """Join samples with those of the siblings, and add what only they have, by these names too."""
    left = dict(others)
    joined = []
    for sample in samples:
        key = (sample.name, tuple(sorted(sample.labels.items())))
        other = left.pop(key, None)
        joined.append(sample if other is None else sample._replace(value=join(sample.value, other)))
    names = names | {sample.name for sample in samples}
    template = samples[0] if samples else None
    if template is not None:
        joined += [
            template._replace(name=name, labels=dict(labels), value=value)
            for (name, labels), value in left.items()
            if name in names
        ]
    return joined


def _is_alive(file: Path) -> bool:
    if not file.stem.isdigit():
        return False
    with suppress(ProcessLookupError):
        os.kill(int(file.stem), 0)
        return True
    return False


def _read(file: Path) -> Any:
    try:
        return orjson.loads(file.read_bytes())
    except (OSError, ValueError):
        return []


def _replace(file: Path, document: Any) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(orjson.dumps(document))
    new.replace(file)


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, how)
        yield
