"""Tasks that run as long as the service does: one that fails is logged, counted and started again.

Gives memory that requests no longer need back to the system.

glibc keeps much of what a large request frees, above and between small blocks that stay: the memory of the
process grows with every new mix of large bodies. `malloc_trim` returns free pages in milliseconds, and with
`cli/quick_start.py` all of them. Whoever needs them again pays for that, so it is called rarely. It is called
also where nothing has grown: what was in use at one call is free at the next, in the same memory.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from boxcal.app.observability.telemetry import Telemetry

logger = logging.getLogger("boxcal")

SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 60.0


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Run a task beside the block; it ends with the block."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def background(
    name: str, work: Callable[[], Awaitable[None]], telemetry: Telemetry
) -> AbstractAsyncContextManager[None]:
    """Run a task beside the block, and start it again where it fails."""
    return beside(_run(name, work, telemetry), name)


async def _run(name: str, work: Callable[[], Awaitable[None]], telemetry: Telemetry) -> None:
    clock, pause = asyncio.get_running_loop().time, SHORTEST_PAUSE
    while True:
        began = clock()
        try:
            await work()
            logger.error("The background task %s ended; it starts again.", name)
        except Exception:
            logger.exception("The background task %s failed; it starts again.", name)
        telemetry.restarted(name)
        pause = SHORTEST_PAUSE if clock() - began > LONGEST_PAUSE else min(2 * pause, LONGEST_PAUSE)
        await asyncio.sleep(pause)


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
