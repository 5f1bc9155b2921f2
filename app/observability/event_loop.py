"""Watches the event loop of a process: how long it does not run, and in which function it is then.

Nothing is measured for a request. A callback that is due every 50 ms sees by how much it is late, and a
thread that sleeps until the callback is overdue reads the stack of the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from types import FrameType

logger = logging.getLogger("boxcal")

BEAT_SECONDS = 0.05
STALL_SECONDS = 0.25
"""A pause so long is logged while it lasts."""
REPORT_SECONDS = 10.0
"""Between two log lines."""
FRAMES = 12
"""Innermost calls of a stack that are named."""


class EventLoopWatch:
    """Measures the pauses of one event loop.

    Code in C that keeps the interpreter delays the thread as well: the stack is read as soon as it returns.

    Parameters
    ----------
    paused
        Called on the event loop with each pause: its duration, and the processor time of the loop's thread
        since the call before, in seconds.
    stalled
        Called in another thread, once for each pause of `stall_seconds`, with its duration so far and the
        stack.
    """

    def __init__(
        self,
        paused: Callable[[float, float], None],
        stalled: Callable[[float, str], None],
        *,
        beat_seconds: float = BEAT_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._paused = paused
        self._stalled = stalled
        self._beat_seconds = beat_seconds
        self._stall_seconds = stall_seconds
        self._ended = threading.Event()
        self._handle: asyncio.TimerHandle | None = None
        self._due = self._processor_seconds = 0.0

    def start(self) -> None:
        """Begin to watch the event loop that runs in this thread."""
        self._loop = asyncio.get_running_loop()
        self._expect()
        threading.Thread(
            target=self._sample, args=(threading.get_ident(),), name="event-loop-watch", daemon=True
        ).start()

    def stop(self) -> None:
        """End; called on the event loop, or after it has ended."""
        self._ended.set()
        if self._handle is not None:
            self._handle.cancel()

    def beat(self) -> None:
        """Measure the pause that ends now, if there is one; called on the event loop."""
        if self._handle is not None:
            self._handle.cancel()
        if not self._ended.is_set():
            late = max(0.0, time.monotonic() - self._due)
            self._paused(late, time.thread_time() - self._processor_seconds)
            self._expect()

    def _expect(self) -> None:
        self._processor_seconds = time.thread_time()
        self._due = time.monotonic() + self._beat_seconds
        self._handle = self._loop.call_later(self._beat_seconds, self.beat)

    def _sample(self, thread_id: int) -> None:
        """Wait until a beat is overdue, report where the event loop is, and wait for the next beat."""
        reported = 0.0
        while True:
            due = self._due
            wait = due + self._stall_seconds - time.monotonic() if due != reported else self._stall_seconds
            if self._ended.wait(max(0.0, wait)):
                return
            if due in (reported, 0.0) or due != self._due:
                continue
            late = time.monotonic() - due
            if late >= self._stall_seconds:
                reported = due
                self._stalled(late, described(sys._current_frames().get(thread_id)))


def described(frame: FrameType | None) -> str:
    """Name the calls of a stack in one line, the innermost first."""
    return " < ".join(
        f"{one.f_code.co_qualname} ({'/'.join(Path(one.f_code.co_filename).parts[-2:])}:{line})"
        for one, line in islice(traceback.walk_stack(frame), FRAMES)
    )


class StallLog:
    """Logs a pause with the stack of the event loop; those shortly after another are counted."""

    def __init__(self) -> None:
        self._next = 0.0
        self._left_out = 0

    def __call__(self, seconds: float, stack: str) -> None:
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return
        self._next = now + REPORT_SECONDS
        logger.warning(
            "The event loop has not run for %.2f s (%d earlier pauses were not logged); it is in %s",
            seconds,
            self._left_out,
            stack,
        )
        self._left_out = 0


@contextmanager
def watched(paused: Callable[[float], None]) -> Iterator[None]:
    """Watch this event loop for the duration of a block: pass its pauses on, and log those that are long."""
    watch = EventLoopWatch(lambda seconds, _: paused(seconds), StallLog())
    watch.start()
    try:
        yield
    finally:
        watch.stop()
