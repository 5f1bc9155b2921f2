"""Whether the database of the registry answers, and the threads that call it.

A database that hangs blocks these threads and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from boxcal.app.http.problems import RegistryUnavailable

logger = logging.getLogger("boxcal")

GAP_SECONDS = 10.0

P = ParamSpec("P")
T = TypeVar("T")


class Contact:
    """Whether a database answers; only changes are logged. Its methods may be called from any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._answered = self._steady_from = time.monotonic()
        self._failed = 0.0
        self._is_lost = False

    def made(self) -> None:
        """Record that the database answered."""
        with self._lock:
            now = time.monotonic()
            gap, was_lost, self._is_lost = now - self._answered, self._is_lost, False
            if was_lost or gap > GAP_SECONDS:
                self._steady_from = now
            self._answered = now
        if was_lost:
            logger.warning("The registry at %s answers again after %.0f s.", self._name, gap)

    def lost(self, reason: str) -> None:
        """Record that the database did not answer."""
        with self._lock:
            was_lost, self._is_lost = self._is_lost, True
            self._failed = time.monotonic()
        if not was_lost:
            logger.warning("The registry at %s does not answer: %s", self._name, reason)

    def failed_after(self, moment: float) -> bool:
        """Whether the database is lost, and failed to answer after a moment of `time.monotonic`."""
        return self._is_lost and self._failed > moment

    def seconds_since_answer(self) -> float:
        """Seconds since the last answer."""
        return time.monotonic() - self._answered

    def seconds_without_gap(self) -> float:
        """Seconds over which the database has answered without a gap."""
        return self._answered - self._steady_from


class RegistryThreads:
    """As many threads as the database has connections."""

    def __init__(self, contact: Contact, count: int) -> None:
        self._contact = contact
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="registry")

    async def run(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call something that uses the registry, in a thread."""
        asked = time.monotonic()

        def work() -> T:
            if self._contact.failed_after(asked):
                raise RegistryUnavailable("The registry does not answer.")
            return call(*arguments, **named)

        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Wait for the calls that run; those that wait are dropped."""
        self._pool.shutdown(cancel_futures=True)
