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


async def follow(registry: Registry, activator: Activator, workspace: Workspace) -> None:
    """Follow without end; what fails is tried again in the next turn, and logged once."""
    logged = ""
    for turn in itertools.count(1):
        await asyncio.sleep(FOLLOW_SECONDS)
        try:
            if turn % SWEEP_EVERY == 0:
                await registry.run(registry.fits.keep_alive)
                living = await asyncio.to_thread(workspace.sweep)
                await registry.run(registry.fits.interrupt_abandoned, living)
            await registry.run(activator.follow)
            logged = ""
        except RegistryUnavailable:
            continue  # the registry logs that it is lost, once
        except BoxcalError as error:
            if str(error) != logged:
                logged = str(error)
                logger.error("An activation by another process was not followed: %s", error)
