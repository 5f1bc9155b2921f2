"""Puts the registry and the refit path together at start-up, each after what it depends on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.refit.activation import Activator
from app.refit.jobs import FitJobs
from app.refit.workspace import Workspace
from app.registry.records import BackboneIdentity
from app.registry.store import Registry

if TYPE_CHECKING:
    from app.telemetry import Telemetry


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
    data_dir: Path, url: str, backbone: BackboneIdentity, telemetry: Telemetry
) -> AsyncIterator[Refits]:
    """Open the registry, restore the calibrator in force and take fits; all is closed in reverse.

    Parameters
    ----------
    data_dir
        Where validation sets wait for their fits.
    url
        SQLAlchemy URL of the registry.

    Raises
    ------
    RegistryUnusable, DamagedArtifact
        The database cannot be used; the calibrator in force cannot be read.
    """
    async with AsyncExitStack() as stack:
        workspace = await asyncio.to_thread(Workspace, data_dir)
        stack.callback(workspace.close)
        registry = await asyncio.to_thread(
            Registry.open, url, backbone, owner=workspace.name, living=workspace.living
        )
        stack.callback(registry.close)
        activator = await asyncio.to_thread(Activator, registry, backbone.num_classes, telemetry)
        jobs = FitJobs(registry, activator, workspace, telemetry)
        await jobs.start()
        stack.push_async_callback(jobs.close)
        yield Refits(registry, activator, jobs)
