"""`boxcal worker`: runs the fits of the queue in a process that serves no requests.

Any number of these processes share the registry and the directory of validation sets with the services. Each
takes the oldest fit that has no owner, and continues those of processes that stopped.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack
from logging.config import dictConfig

from boxcal.app.fitting.backbones import BackboneSource
from boxcal.app.fitting.server.build import FitService, open_refits
from boxcal.app.observability.logs import log_config
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.registry.records import BackboneIdentity
from boxcal.app.settings.service import Settings

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
