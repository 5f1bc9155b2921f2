"""Puts the registry and the refit path together at start-up, each after what it depends on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy.exc import SQLAlchemyError

from boxcal.app.activation.activator import Activator
from boxcal.app.errors import BoxcalError
from boxcal.app.fitting.backbones import BackboneSource, BackboneSummary
from boxcal.app.fitting.jobs import FitJobs, FitLimits
from boxcal.app.registry.records import BackboneIdentity
from boxcal.app.registry.store import Registry
from boxcal.app.uploads.workspace import Workspace

if TYPE_CHECKING:
    from boxcal.app.telemetry import Telemetry
    from boxcal.models.backbone import Backbone


logger = logging.getLogger("boxcal")

FOLLOW_SECONDS = 2.0
SWEEP_EVERY = 10


@dataclass(frozen=True, slots=True)
class Refits:
    """What the service holds of the refit path.

    Attributes
    ----------
    activator
        `activator.active` is the reference that predictions read.
    """

    registry: Registry
    activator: Activator
    jobs: FitJobs


@asynccontextmanager
async def open_refits(
    data_dir: Path,
    url: str,
    identity: BackboneIdentity,
    *,
    backbone: Backbone,
    source: BackboneSource,
    limits: FitLimits,
    telemetry: Telemetry,
) -> AsyncIterator[Refits]:
    """Open the registry, restore the active calibrator and take fits; all is closed in reverse.

    Parameters
    ----------
    data_dir
        Where uploads wait for their fits.
    url
        SQLAlchemy URL of the registry.
    identity, backbone, source
        What calibrators belong to, the backbone itself, and how another process loads it.
    limits
        Of uploads and fits.

    Raises
    ------
    RegistryUnusable, DamagedArtifact
        The database cannot be used; the active calibrator cannot be read.
    """
    async with AsyncExitStack() as stack:
        workspace = await asyncio.to_thread(Workspace, data_dir)
        stack.callback(workspace.close)
        living = await asyncio.to_thread(workspace.sweep)
        registry = await asyncio.to_thread(Registry.open, url, identity, owner=workspace.name, living=living)
        stack.callback(registry.close)
        activator = await asyncio.to_thread(Activator, registry, identity.num_classes, telemetry)
        summary = await asyncio.to_thread(BackboneSummary.of, backbone, workspace.folder)
        jobs = FitJobs(
            registry, activator, workspace, telemetry, source=source, summary=summary, limits=limits
        )
        stack.push_async_callback(jobs.close)
        stack.push_async_callback(cancelled, asyncio.create_task(follow(registry, activator, workspace)))
        yield Refits(registry, activator, jobs)


async def follow(registry: Registry, activator: Activator, workspace: Workspace) -> None:
    """Do what other processes that share the registry make necessary, for as long as the service runs.

    They activate calibrators, which this one then activates as well, and they die in the middle of a fit.
    """
    while True:
        for _ in range(SWEEP_EVERY):
            await asyncio.sleep(FOLLOW_SECONDS)
            await logged(activator.follow)
        await logged(registry.fits.keep_alive)
        await logged(lambda: registry.fits.interrupt_abandoned(workspace.sweep()))


async def logged(work: Callable[[], object]) -> None:
    """Run it in a thread; a database that is away for a while is no reason to stop following."""
    try:
        await asyncio.to_thread(work)
    except (SQLAlchemyError, BoxcalError, OSError):
        logger.exception("What other processes changed in the registry could not be followed")


async def cancelled(task: asyncio.Task[None]) -> None:
    """End a task and wait until it has."""
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
