"""Follows the other processes that share the registry: they activate calibrators, and stop during fits.

Waits for changes in the registry: notified by PostgreSQL, or after a fixed time.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from boxcal.app.http.problems import BoxcalError, RegistryUnavailable
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.database import Database
from boxcal.app.registry.store import Registry

if TYPE_CHECKING:
    import psycopg


SPREAD_SECONDS = 0.1
"""Replicas react to one notification at different moments, so that they do not query all at once."""
RECONNECT_SECONDS = 30.0


class Notifications:
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


logger = logging.getLogger("boxcal")

FOLLOW_SECONDS = 2.0
SWEEP_SECONDS = 4.0
PRUNE_SECONDS = 3600.0


async def follow(
    registry: Registry,
    activator: Activator,
    follow_fits: Callable[[], Awaitable[None]],
    sweep_fits: Callable[[], Awaitable[None]],
    keep: tuple[int, float] | None = None,
) -> None:
    """Follow without end; what fails is tried again in the next turn, and logged once.

    `follow_fits`: called when the cancellation of a fit was requested. `sweep_fits`: called every
    `SWEEP_SECONDS`, and at once where a fit has no living owner. `keep`: versions and days as for
    `Registry.prune`, done every hour; None to keep everything.
    """
    clock = asyncio.get_running_loop().time
    notifications = Notifications(registry.database)
    next_sweep, next_prune, logged = clock() + SWEEP_SECONDS, clock(), ""
    try:
        while True:
            await notifications.wait(FOLLOW_SECONDS)
            try:
                seen = await registry.run(registry.snapshots.take)
                registry.snapshots.announce()
                if seen.is_cancelled:
                    await follow_fits()
                if clock() >= next_sweep or (seen.is_abandoned and not registry.database.is_sqlite):
                    next_sweep = clock() + SWEEP_SECONDS
                    await sweep_fits()
                if keep is not None and clock() >= next_prune:
                    next_prune = clock() + PRUNE_SECONDS
                    pruned = await registry.run(registry.prune, *keep)
                    if pruned:
                        logger.info("Pruned the calibrators %s.", ", ".join(map(str, pruned)))
                # Last: a calibrator that cannot be loaded fails in every turn, and fits do not depend on it.
                if seen.activation > activator.active.activation:
                    await registry.run(activator.follow)
                logged = ""
            except RegistryUnavailable:
                continue  # the registry logs that it is lost, once
            except BoxcalError as error:
                if str(error) != logged:
                    logged = str(error)
                    logger.error("An activation by another process was not followed: %s", error)
    finally:
        await notifications.close()
