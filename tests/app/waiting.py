"""Waits for what a service does within seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def until(is_so: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


async def eventually(is_so: Callable[[], bool]) -> None:
    """Wait for what threads and other processes bring about, which know no event of this loop."""
    async with asyncio.timeout(120):
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
