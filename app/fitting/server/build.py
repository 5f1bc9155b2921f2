"""Puts the registry and the refit path together at start-up, each after what it depends on.

A background task follows the other processes that share the registry: they activate calibrators, and stop
during fits. `boxcal worker` is a process that follows and fits, and serves no requests: any number of them
take the oldest fit that has no owner, and continue those of processes that stopped.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from logging.config import dictConfig
from pathlib import Path
from typing import TYPE_CHECKING

from boxcal.app.fitting.backbones import BackboneSource, BackboneSummary
from boxcal.app.fitting.server.jobs import FitJobs
from boxcal.app.fitting.server.worker_process import Workers
from boxcal.app.fitting.server.workspace import Workspace
from boxcal.app.http.problems import BoxcalError, InternalError, RegistryUnavailable
from boxcal.app.observability.logs import log_config
from boxcal.app.observability.supervised_task import background
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.records import BackboneIdentity
from boxcal.app.registry.snapshot import Notifications
from boxcal.app.registry.storage import FILE_NAME, CalibratorCopy, SharedArtifacts, SharedSets, open_storage
from boxcal.app.registry.store import Registry
from boxcal.app.settings.service import Settings

if TYPE_CHECKING:
    from boxcal.models.backends.backbone import Backbone

logger = logging.getLogger("boxcal")


@dataclass(frozen=True, slots=True)
class FitService:
    """What the service holds of the refit path."""

    registry: Registry
    activator: Activator  # `activator.active` is the reference that predictions read
    jobs: FitJobs


@asynccontextmanager
async def open_refits(
    data_dir: Path,
    url: str,
    identity: BackboneIdentity,
    *,
    backbone: Backbone,
    source: BackboneSource,
    memory_bytes: int,
    telemetry: Telemetry,
    keep: tuple[int, float] | None = None,
    migrate: bool = True,
    shared_dir: Path | str | None = None,
    queues_only: bool = False,
    beside: FitService | None = None,
    cores: Collection[int] | None = None,
    name: str = "",
) -> AsyncIterator[FitService]:
    """Open the registry, restore the active calibrator and take fits; all is closed in reverse.

    `url`: SQLAlchemy URL of the registry. `keep`: newest versions and days to keep, as for `Registry.prune`;
    None to keep every calibrator. `shared_dir`: directory or bucket that the replicas share for validation
    sets; None if there is none.
    """
    async with AsyncExitStack() as stack:
        workspace = await asyncio.to_thread(Workspace, data_dir)
        stack.callback(workspace.close)
        storage = await asyncio.to_thread(open_storage, shared_dir)
        files = None if storage is None else SharedArtifacts(storage)
        lender = None if beside is None else beside.registry
        registry = Registry(url, identity, owner=workspace.name, migrate=migrate, files=files, beside=lender)
        stack.push_async_callback(asyncio.to_thread, registry.close)
        telemetry.watch_registry(registry.database.availability.seconds_since_answer)
        copy = (
            None
            if registry.database.is_sqlite
            else CalibratorCopy(data_dir, identity, f"active-{name}.calibrator" if beside else FILE_NAME)
        )
        activator = await registry.run(Activator, registry, identity.num_classes, telemetry, copy)
        summary = await asyncio.to_thread(BackboneSummary.of, backbone, workspace.folder)
        owner = registry.fits.owner
        shared = None if storage is None else SharedSets(storage, owner, workspace.new_folder)
        jobs = FitJobs(
            registry,
            activator,
            workspace,
            telemetry,
            source=source,
            summary=summary,
            memory_bytes=memory_bytes,
            shared=shared,
            queues_only=queues_only,
            workers=Workers.of(workspace.root, cores) if beside is None else beside.jobs.workers,
            closes_workers=beside is None,
        )
        stack.push_async_callback(jobs.close)
        try:
            await jobs.sweep()
        except RegistryUnavailable:
            pass  # the follower sweeps again
        except (FileNotFoundError, PermissionError) as error:  # no such bucket, or not with these keys
            raise InternalError(f"BOXCAL_SHARED_DIR is {shared_dir}: {error}") from error
        except OSError as error:
            logger.warning("BOXCAL_SHARED_DIR is %s, which cannot be used now: %s", shared_dir, error)
        following = background(
            "follower", lambda: follow(registry, activator, jobs.follow, jobs.sweep, keep), telemetry
        )
        await stack.enter_async_context(following)
        yield FitService(registry, activator, jobs)


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


async def work(settings: Settings, stop: asyncio.Event) -> None:
    """Run fits until `stop` is set; a fit that runs by then is left to the next process."""
    async with AsyncExitStack() as stack:
        first: FitService | None = None
        others: list[BackboneIdentity] = []
        for entry in settings.entries():
            source = BackboneSource.of(entry.settings)
            backbone = await asyncio.to_thread(source.load)
            identity = BackboneIdentity(backbone.name, backbone.fingerprint, tuple(backbone.labels))
            others.append(identity := identity.apart_from(others, entry.name))
            refits = await stack.enter_async_context(
                open_refits(
                    settings.data_dir,
                    settings.registry_url,
                    identity,
                    backbone=backbone,
                    source=source,
                    memory_bytes=settings.fit_memory_bytes,
                    telemetry=Telemetry({}),
                    migrate=settings.migrate == "on",
                    shared_dir=settings.shared_dir,
                    beside=first,
                    name=entry.name,
                )
            )
            first = first or refits
            logger.info("fitting for %s: %d classes", entry.name or backbone.name, backbone.num_classes)
        await stop.wait()


def run(settings: Settings) -> None:
    """Run fits until SIGTERM or SIGINT."""
    dictConfig(log_config(settings))

    async def whole() -> None:
        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for stopping in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(stopping, stop.set)
        await work(settings, stop)

    asyncio.run(whole())
