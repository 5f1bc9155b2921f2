"""Puts the registry and the refit path together at start-up, each after what it depends on.

`boxcal worker`: runs the fits of the queue in a process that serves no requests.

Any number of these processes share the registry and the directory of validation sets with the services. Each
takes the oldest fit that has no owner, and continues those of processes that stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from boxcal.app.fitting.backbones import BackboneSource, BackboneSummary
from boxcal.app.fitting.server.jobs import FitJobs
from boxcal.app.fitting.server.shared_sets import BucketSets, SharedSets
from boxcal.app.fitting.server.worker_process import Workers
from boxcal.app.fitting.server.workspace import Workspace
from boxcal.app.http.problems import RegistryUnavailable
from boxcal.app.observability.supervised_task import background
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.artifacts import FILE_NAME, FOLDER, ArtifactFiles, ArtifactObjects, LocalCopy
from boxcal.app.registry.bucket import SCHEME, Bucket
from boxcal.app.registry.follow import follow
from boxcal.app.registry.records import BackboneIdentity
from boxcal.app.registry.store import Registry

if TYPE_CHECKING:
    from boxcal.app.observability.telemetry import Telemetry
    from boxcal.models.backends.backbone import Backbone

import logging
import signal
from logging.config import dictConfig

from boxcal.app.observability.logs import log_config
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.settings.service import Settings


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
        bucket = await asyncio.to_thread(Bucket, str(shared_dir)) if is_bucket(shared_dir) else None
        files = await asyncio.to_thread(shared_artifacts, shared_dir, bucket)
        lender = None if beside is None else beside.registry
        registry = Registry(url, identity, owner=workspace.name, migrate=migrate, files=files, beside=lender)
        stack.push_async_callback(asyncio.to_thread, registry.close)
        telemetry.watch_registry(registry.database.availability.seconds_since_answer)
        copy = (
            None
            if registry.database.is_sqlite
            else LocalCopy(data_dir, identity, f"active-{name}.calibrator" if beside else FILE_NAME)
        )
        activator = await registry.run(Activator, registry, identity.num_classes, telemetry, copy)
        summary = await asyncio.to_thread(BackboneSummary.of, backbone, workspace.folder)
        shared = shared_sets(shared_dir, bucket, workspace, registry.fits.owner)
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
            workers=Workers.of(cores) if beside is None else beside.jobs.workers,
            closes_workers=beside is None,
        )
        stack.push_async_callback(jobs.close)
        with suppress(RegistryUnavailable):
            await jobs.sweep()
        following = background(
            "follower", lambda: follow(registry, activator, jobs.follow, jobs.sweep, keep), telemetry
        )
        await stack.enter_async_context(following)
        yield FitService(registry, activator, jobs)


def is_bucket(shared_dir: Path | str | None) -> bool:
    """Whether replicas share a bucket, not a directory."""
    return str(shared_dir).startswith(SCHEME)


def shared_artifacts(
    shared_dir: Path | str | None, bucket: Bucket | None
) -> ArtifactFiles | ArtifactObjects | None:
    """Return where replicas share artifacts, if they do."""
    if bucket is not None:
        return ArtifactObjects(bucket)
    return None if shared_dir is None else ArtifactFiles(Path(shared_dir) / FOLDER)


def shared_sets(
    shared_dir: Path | str | None, bucket: Bucket | None, workspace: Workspace, owner: str
) -> SharedSets | BucketSets | None:
    """Return where replicas share validation sets, if they do."""
    if bucket is not None:
        return BucketSets(bucket, workspace.new_folder)
    return None if shared_dir is None else SharedSets(Path(shared_dir), owner)


logger = logging.getLogger("boxcal")


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
