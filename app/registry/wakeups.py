"""Waits for changes in the registry: notified by PostgreSQL, or after a fixed time."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from boxcal.app.registry.database import Database

if TYPE_CHECKING:
    import psycopg

SPREAD_SECONDS = 0.1
"""Replicas react to one notification at different moments, so that they do not query all at once."""
RECONNECT_SECONDS = 30.0


class Wakeups:
    """One connection that listens, if the registry is on PostgreSQL; without it, waiting is polling.

    Behind PgBouncer in transaction mode no notification arrives, and `wait` always takes its full time.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._connect_from = 0.0

    async def wait(self, seconds: float) -> None:
        """Wait for a notification, at most `seconds`."""
        if self._database.is_sqlite:
            await asyncio.sleep(seconds)
            return
        import psycopg  # noqa: PLC0415 - a registry on SQLite starts sooner without

        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        try:
            if self._connection is None and loop.time() >= self._connect_from:
                self._connect_from = loop.time() + RECONNECT_SECONDS
                self._connection = await self._database.listen()
            if self._connection is not None:
                left = max(0.0, until - loop.time())
                async for _ in self._connection.notifies(timeout=left, stop_after=1):
                    await asyncio.sleep(random.uniform(0, SPREAD_SECONDS))  # noqa: S311 - no secret
                return
        except (psycopg.Error, OSError):
            await self.close()
        await asyncio.sleep(max(0.0, until - loop.time()))

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()
