"""Compiles the solver on a first start, beside the service; requests that need it wait until it is loaded.

Another process of low priority compiles, and this one loads what that has left on disk: a compiler in this
process would hold the interpreter, and so the event loop, for most of its 20 seconds. After it, one more
compiles what fits and the monitor call, so that the first fit need not.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from boxcal.calibrators.temperature_fast_path import solver_can_be_kept, solver_is_kept, warm_arrays

MODULE, OTHER_LOOPS = "boxcal.calibrators.temperature_fast_path", "boxcal.calibrators.warm"
TURN_SECONDS = 0.05
NICENESS = 5


class Solver:
    """What a request waits for that the softmax alone cannot answer."""

    is_loading = False

    def __init__(self) -> None:
        self._loading: asyncio.Task[None] | None = None

    async def wait(self) -> None:
        """Wait until it is loaded."""
        if self._loading is not None:
            await asyncio.wait([self._loading])

    @asynccontextmanager
    async def loading(self) -> AsyncIterator[None]:
        """Load the solver, at once if it was compiled before, else beside the block."""
        if await asyncio.to_thread(solver_is_kept):
            await asyncio.to_thread(warm_arrays)
            yield
            return
        can_be_kept = await asyncio.to_thread(solver_can_be_kept)
        self.is_loading = True
        self._loading = asyncio.create_task(self._load(can_be_kept=can_be_kept), name="solver")
        tasks = [self._loading]
        if can_be_kept:
            tasks.append(asyncio.create_task(self._compile_others(), name="other loops"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _load(self, *, can_be_kept: bool) -> None:
        if can_be_kept:
            await _compile(MODULE)
        # Loads it in milliseconds; compiles it where nothing could be kept. The service ends without waiting.
        thread = threading.Thread(target=_compile_here, name="solver", daemon=True)
        thread.start()
        while thread.is_alive():  # noqa: ASYNC110 - a thread sets no event of the loop
            await asyncio.sleep(TURN_SECONDS)
        self.is_loading = False

    async def _compile_others(self) -> None:
        await self.wait()
        await _compile(OTHER_LOOPS)


async def _compile(module: str) -> None:
    """Run a module that compiles loops and leaves them on disk, in a process of low priority."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    child = subprocess.Popen(  # noqa: ASYNC220, S603 - this interpreter and a module of this package
        [sys.executable, "-P", "-m", module],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        lower_thread_priority(child.pid)
        await asyncio.to_thread(child.wait)
    finally:
        child.kill()


def _compile_here() -> None:
    lower_thread_priority()
    warm_arrays()


def lower_thread_priority(thread: int = 0) -> None:
    """Lower the priority of a thread below the event loop's: health checks must be answered under load.

    Linux has a priority for each thread, by its id (0: this one). What it starts (OpenMP's) inherits it.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
