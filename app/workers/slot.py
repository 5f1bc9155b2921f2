"""The place of a serving process among those of one service, and the cores that belong to it.

Each process runs on an equal part of the cores, with one pass at a time per core. Without that each would
run a pass per core of the machine: passes that share a core cost a tenth more, mostly in caches.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path


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
