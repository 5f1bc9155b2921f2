"""Which cores each serving process runs on: an equal part of them, so that no two wait for the same one.

Pinned processes of one core run one pass at a time, on one thread. Without it each would run a pass per core:
passes that take each other's core in turns cost a tenth more, mostly in caches.
"""

from __future__ import annotations

import os
from collections.abc import Collection


def share(cores: Collection[int], index: int, count: int) -> frozenset[int]:
    """Return the cores of one of `count` processes; all where they cannot be divided equally."""
    size, rest = divmod(len(cores), count)
    if rest or not size:
        return frozenset(cores)
    return frozenset(sorted(cores)[index * size : (index + 1) * size])


def take_share(index: int, count: int) -> frozenset[int] | None:
    """Restrict this process to its cores; returns those that it had, None where the system has no such limit.

    To be called before a library starts threads, which keep the cores of the thread that starts them.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    all_cores = frozenset(os.sched_getaffinity(0))
    os.sched_setaffinity(0, share(all_cores, index, count))
    return all_cores
