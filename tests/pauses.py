"""Fails a test in which the event loop of a service computes for more than 100 ms without a break.

What counts is the processor time of the loop's thread, so a busy machine fails no test.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest

from boxcal.app.observability.event_loop import EventLoopWatch

MOST_SECONDS = 0.1
BEAT_SECONDS = 0.01


class Pauses:
    """Watches the event loops of the services that the tests start in this process."""

    def __init__(self) -> None:
        self._watches: list[tuple[asyncio.AbstractEventLoop, EventLoopWatch]] = []
        self._found: list[str] = []
        self.longest = 0.0  # Of this test, in seconds
        self._collected: defaultdict[int, float] = defaultdict(float)
        self._collection_began = 0.0
        gc.callbacks.append(self._collects)

    def _collects(self, phase: str, info: Mapping[str, Any]) -> None:
        """Measure full collections: they walk over what the tests hold, which a service does not have."""
        if info["generation"] == 2:
            if phase == "start":
                self._collection_began = time.thread_time()
            else:
                self._collected[threading.get_ident()] += time.thread_time() - self._collection_began

    def start(self) -> None:
        """Watch the event loop that runs in this thread."""
        thread, stack = threading.get_ident(), "a function that was not seen"

        def paused(_: float, processor_seconds: float) -> None:
            nonlocal stack
            seconds = processor_seconds - self._collected.pop(thread, 0.0)
            self.longest = max(self.longest, seconds)
            if seconds > MOST_SECONDS:
                self._found.append(f"{seconds:.3f} s in {stack}")
            stack = "a function that was not seen"

        def stalled(_: float, seen: str) -> None:
            nonlocal stack
            stack = seen

        watch = EventLoopWatch(paused, stalled, beat_seconds=BEAT_SECONDS, stall_seconds=MOST_SECONDS / 2)
        watch.start()
        self._watches.append((asyncio.get_running_loop(), watch))

    @contextmanager
    def watched(self, server: Any) -> Iterator[None]:
        """Watch a uvicorn server from the end of its startup until the block ends."""
        startup, first = server.startup, len(self._watches)

        async def started(*given: Any, **named: Any) -> None:
            await startup(*given, **named)
            self.start()

        server.startup = started
        try:
            yield
        finally:
            self.settle()
            for _, watch in self._watches[first:]:
                watch.stop()
            del self._watches[first:]

    def settle(self) -> None:
        """Wait until each event loop has run again."""
        for loop, watch in self._watches:
            beaten = threading.Event()

            def beat(watch: EventLoopWatch = watch, beaten: threading.Event = beaten) -> None:
                watch.beat()
                beaten.set()

            try:
                loop.call_soon_threadsafe(beat)
            except RuntimeError:  # the service of this loop has ended
                continue
            beaten.wait(5)

    def clear(self) -> None:
        self.settle()
        self._found.clear()
        self.longest = 0.0

    def check(self) -> None:
        """Fail a test that paused an event loop."""
        self.settle()
        if self._found:
            pytest.fail(
                f"The event loop computed for more than {MOST_SECONDS:g} s: " + "; ".join(self._found), False
            )


PAUSES = Pauses()
