"""Tasks that run as long as the service does: one that fails is logged, counted and started again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from boxcal.app.observability.telemetry import Telemetry

logger = logging.getLogger("boxcal")

SHORTEST_PAUSE, LONGEST_PAUSE = 1.0, 60.0


@asynccontextmanager
async def background(
    name: str, work: Callable[[], Awaitable[None]], telemetry: Telemetry
) -> AsyncIterator[None]:
    """Run a task beside the block; it ends with the block."""
    task = asyncio.create_task(_run(name, work, telemetry), name=name)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


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
