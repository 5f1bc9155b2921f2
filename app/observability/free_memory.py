"""Gives memory that requests no longer need back to the system.

glibc keeps much of what a large request frees, above and between small blocks that stay: the memory of the
process grows with every new mix of large bodies. `malloc_trim` returns free pages in milliseconds, and with
`cli/quick_start.py` all of them. Whoever needs them again pays for that, so it is called rarely. It is called
also where nothing has grown: what was in use at one call is free at the next, in the same memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

STATM = Path("/proc/self/statm")
"""Its second number counts the resident pages of this process."""
PAUSE_SECONDS = 30.0
BYTES_PER_SECOND = 16 * 2**20
"""Most that is returned, on average: at 4 GB/s, its pages cost below half a percent of one core."""


class FreeMemory:
    """Returns what is free, again and again; does nothing without glibc."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if STATM.exists() else None

    async def run(self) -> None:
        """Return free memory without end."""
        while True:
            returned = 0 if self._trim is None else await asyncio.to_thread(self.give_back)
            await asyncio.sleep(max(PAUSE_SECONDS, returned / BYTES_PER_SECOND))

    def give_back(self) -> int:
        """Return free memory; gives the bytes that the process has less."""
        if self._trim is None:
            return 0
        before = resident_bytes()
        self._trim(0)
        return max(0, before - resident_bytes())


def resident_bytes() -> int:
    """Return the memory that this process has in use."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
