"""Gives memory that requests no longer need back to the system.

glibc keeps much of what a large request frees, above and between small blocks that stay: the memory of the
process grows with every new mix of large bodies. `malloc_trim` returns free pages in milliseconds, and with
`cli/allocator.py` all of them. Whoever needs them again pays for that: it is called rarely, and after growth.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from pathlib import Path

STATM = Path("/proc/self/statm")
"""Its second number counts the resident pages of this process."""
CHECK_SECONDS = 10.0
GROWTH_BYTES = 8 * 2**20
"""What may be added to the memory without a return."""
BYTES_PER_SECOND = 16 * 2**20
"""Most that is returned, on average: at 4 GB/s, its pages cost below half a percent of one core."""


class FreeMemory:
    """Watches the memory of this process, and returns what is free; does nothing without glibc."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if STATM.exists() else None
        self._least = 0

    async def run(self) -> None:
        """Watch without end."""
        while True:
            returned = 0 if self._trim is None else await asyncio.to_thread(self.look)
            await asyncio.sleep(max(CHECK_SECONDS, returned / BYTES_PER_SECOND))

    def look(self) -> int:
        """Return free memory if the process has grown; gives the bytes returned."""
        before = resident_bytes()
        if self._trim is None or before < self._least + GROWTH_BYTES:
            return 0
        self._trim(0)
        after = resident_bytes()
        returned = max(0, before - after)
        # Where much was free, the rest may be of requests under way; where little was, it is in use.
        self._least = after if returned < GROWTH_BYTES else min(self._least, after)
        return returned


def resident_bytes() -> int:
    """Return the memory that this process has in use."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
