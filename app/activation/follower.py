"""Follows the other processes that share the registry: they activate calibrators, and die during fits."""

from __future__ import annotations

import asyncio
import itertools
import logging

from boxcal.app.activation.activator import Activator
from boxcal.app.errors import BoxcalError
from boxcal.app.registry.errors import RegistryUnavailable
from boxcal.app.registry.store import Registry
from boxcal.app.uploads.workspace import Workspace

logger = logging.getLogger("boxcal")

FOLLOW_SECONDS = 2.0
SWEEP_EVERY = 10
PRUNE_EVERY = 1800


async def follow(
    registry: Registry, activator: Activator, workspace: Workspace, keep: tuple[int, float] | None = None
) -> None:
    """Follow without end; what fails is tried again in the next turn, and logged once.

    Parameters
    ----------
    keep
        Versions and days as for `Registry.prune`, done every hour; None to keep everything.
    """
    logged = ""
    for turn in itertools.count(1):
        await asyncio.sleep(FOLLOW_SECONDS)
        try:
            if turn % SWEEP_EVERY == 0:
                await registry.run(registry.fits.keep_alive)
                living = await asyncio.to_thread(workspace.sweep)
                await registry.run(registry.fits.interrupt_abandoned, living)
            await registry.run(activator.follow)
            if keep is not None and turn % PRUNE_EVERY == 1:
                pruned = await registry.run(registry.prune, *keep)
                if pruned:
                    logger.info("Pruned the calibrators %s.", ", ".join(map(str, pruned)))
            logged = ""
        except RegistryUnavailable:
            continue  # the registry logs that it is lost, once
        except BoxcalError as error:
            if str(error) != logged:
                logged = str(error)
                logger.error("An activation by another process was not followed: %s", error)
