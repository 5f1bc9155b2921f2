"""Follows the other processes that share the registry: they activate calibrators, and stop during fits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from boxcal.app.http.problems import BoxcalError, RegistryUnavailable
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.store import Registry
from boxcal.app.registry.wakeups import Wakeups

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
    wakeups = Wakeups(registry.database)
    next_sweep, next_prune, logged = clock() + SWEEP_SECONDS, clock(), ""
    try:
        while True:
            await wakeups.wait(FOLLOW_SECONDS)
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
        await wakeups.close()
