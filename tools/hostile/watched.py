"""Runs first in the process of the service that is fuzzed: watches its event loop, frees memory on demand.

It uses none of the modules of the service, so that it also runs in another release.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import uvicorn

MOST_SECONDS = 0.1
BEAT_SECONDS = 0.01
EVENT_LOOP = Path(__file__).parents[2] / "app" / "observability" / "event_loop.py"
PAUSES = "FUZZ_PAUSES"
"""Variable with the path of a file: a line for each pause, when it ended and how long it was in seconds."""


def install() -> None:
    """Watch the event loop of the server that starts in this process, and free memory at SIGUSR2."""
    specification = importlib.util.spec_from_file_location("watched_event_loop", EVENT_LOOP)
    assert specification is not None
    assert specification.loader is not None
    event_loop = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(event_loop)
    startup = uvicorn.Server.startup
    stack = ""

    def paused(late: float, processor_seconds: float) -> None:
        nonlocal stack
        if processor_seconds > MOST_SECONDS:
            with Path(os.environ[PAUSES]).open("a") as file:
                file.write(f"{time.monotonic()} {late + BEAT_SECONDS} {processor_seconds} {stack or '?'}\n")
        stack = ""

    def stalled(_: float, seen: str) -> None:
        nonlocal stack
        stack = seen

    async def started(self: Any, *given: Any, **named: Any) -> None:
        await startup(self, *given, **named)
        watch = event_loop.EventLoopWatch(
            paused, stalled, beat_seconds=BEAT_SECONDS, stall_seconds=MOST_SECONDS / 2
        )
        watch.start()

    uvicorn.Server.startup = started  # type: ignore[method-assign]

    def free() -> None:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)

    def in_thread(*_: object) -> None:
        threading.Thread(target=free).start()  # not a pause of the event loop

    signal.signal(signal.SIGUSR2, in_thread)
