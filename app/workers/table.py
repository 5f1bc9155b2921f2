"""A table in memory that the supervisor and the serving processes share: heartbeats and connections.

The place of a serving process among those of one service, and the cores that belong to it.

Each process runs on an equal part of the cores, with one pass at a time per core. Without that each would
run a pass per core of the machine: passes that share a core cost a tenth more, mostly in caches.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

CLOSED = 2**30
"""The number of connections of a process that accepts no more."""
_ROW = struct.Struct("qdq")  # process id, time of the heartbeat, connections


class ProcessTable:
    """One row per process; a slot has two, because its next process starts before the present one ends."""

    def __init__(self, folder: Path, slots: int) -> None:
        self._rows = range(2 * slots)
        path = folder / "processes"
        if not path.exists():
            path.write_bytes(_ROW.pack(0, 0.0, CLOSED) * len(self._rows))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _ROW.size * len(self._rows))

    def write(self, row: int, connections: int) -> None:
        """Write that the event loop of this process runs, and how many connections it has."""
        _ROW.pack_into(self._memory, _ROW.size * row, os.getpid(), time.monotonic(), connections)

    def clear(self, row: int) -> None:
        """Write that no process has this row."""
        _ROW.pack_into(self._memory, _ROW.size * row, 0, 0.0, CLOSED)

    def heartbeat(self, row: int, process: int) -> float:
        """Return when the event loop of a process last ran; 0 before it serves."""
        found, at, _ = _ROW.unpack_from(self._memory, _ROW.size * row)
        return at if found == process else 0.0

    def fewest_connections(self, without: int) -> int:
        """Return how many connections the process with the fewest has, this row aside."""
        rows = [_ROW.unpack_from(self._memory, _ROW.size * row) for row in self._rows if row != without]
        return int(min(connections for _, _, connections in rows))


@dataclass(frozen=True, slots=True)
class Slot:
    """One of the serving processes."""

    index: int  # 0 is the process that runs the fits and folds the feedback log for all
    count: int  # How many processes serve
    row: int  # Of this process in the table of all (`table.py`)
    folder: Path  # Where the processes keep the table and leave their metrics
    # Those of the service, of which this process may have a part; None where that is not known
    cores: frozenset[int] | None = None

    @property
    def leads(self) -> bool:
        """Whether this process does what one process does for all."""
        return self.index == 0


def share_of_cores(cores: Collection[int], index: int, count: int) -> frozenset[int]:
    """Return the cores of one of `count` processes; all where they cannot be divided equally."""
    size, rest = divmod(len(cores), count)
    if rest or not size:
        return frozenset(cores)
    return frozenset(sorted(cores)[index * size : (index + 1) * size])


def take_share_of_cores(index: int, count: int) -> frozenset[int] | None:
    """Restrict this process to its cores; returns those that it had, None where the system has no such limit.

    To be called before a library starts threads, which keep the cores of the thread that starts them.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    all_cores = frozenset(os.sched_getaffinity(0))
    os.sched_setaffinity(0, share_of_cores(all_cores, index, count))
    return all_cores
