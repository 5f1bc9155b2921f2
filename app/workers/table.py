"""A table in memory that the supervisor and the serving processes share: heartbeats and connections."""

from __future__ import annotations

import mmap
import os
import struct
import time
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
