"""Threads for calls to the registry, so that a database that hangs holds up nothing else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from boxcal.app.http.problems import RegistryUnavailable
from boxcal.app.registry.contact import Contact
from boxcal.app.registry.database import CONNECTIONS

P = ParamSpec("P")
T = TypeVar("T")


class RegistryThreads:
    """As many threads as the database has connections.

    Parameters
    ----------
    contact
        Says whether the database answers: once it does not, calls that wait for a thread fail at once.
    """

    def __init__(self, contact: Contact) -> None:
        self._contact = contact
        self._pool = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="registry")

    async def run(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call something that uses the registry, in a thread.

        Raises
        ------
        RegistryUnavailable
            The database does not answer.
        """
        asked = time.monotonic()

        def work() -> T:
            if self._contact.failed_after(asked):
                raise RegistryUnavailable("The registry does not answer.")
            return call(*arguments, **named)

        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        """Wait for the calls that run; those that wait are dropped."""
        self._pool.shutdown(cancel_futures=True)
