"""Opens access at start-up, and follows changes of the keys, which take effect within seconds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from boxcal.app.access.access import Access
from boxcal.app.access.local_keys import LocalKeys
from boxcal.app.access.store import KeyStore
from boxcal.app.http.browsers import is_loopback
from boxcal.app.http.problems import NoApiKey, RegistryUnavailable
from boxcal.app.observability.background import background
from boxcal.app.registry.store import Registry
from boxcal.app.settings.service import Settings

if TYPE_CHECKING:
    from boxcal.app.observability.telemetry import Telemetry

RECORD_SECONDS = 30.0
"""Time between two records of the last uses of keys."""


@asynccontextmanager
async def open_access(settings: Settings, registry: Registry, telemetry: Telemetry) -> AsyncIterator[Access]:
    """Load the keys and follow their changes; the last uses are recorded at the end."""
    copy = None if registry.database.is_sqlite else LocalKeys(settings.data_dir)
    is_open_to_others = not is_loopback(settings.address)
    store = KeyStore(registry.database)
    access = await registry.run(Access, store, copy, is_open_to_others=is_open_to_others)
    if settings.allow_anonymous:
        access.is_required = False
        yield access
        return
    if is_open_to_others and not access.has_keys:
        raise NoApiKey(
            f"BOXCAL_HOST is {settings.host}, which other machines reach, and the registry has no valid "
            "API key. Create one with `boxcal keys create NAME --scope admin`, or set "
            "BOXCAL_ALLOW_ANONYMOUS=1 to serve everyone."
        )
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_record_last_uses, access, registry)
        await stack.enter_async_context(background("keys", lambda: _follow(access, registry), telemetry))
        yield access


async def _record_last_uses(access: Access, registry: Registry) -> None:
    with suppress(RegistryUnavailable):
        await registry.run(access.record_uses)


async def _follow(access: Access, registry: Registry) -> None:
    """Load the keys again whenever their numbers in the registry change, and record their last uses."""
    clock = asyncio.get_running_loop().time
    loaded: tuple[int, int] | None = None
    next_record = clock() + RECORD_SECONDS
    while True:
        keys = (await registry.snapshots.next()).keys
        try:
            if keys != loaded:
                await registry.run(access.load)
                loaded = keys
            if clock() >= next_record:
                next_record = clock() + RECORD_SECONDS
                await registry.run(access.record_uses)
        except RegistryUnavailable:
            continue  # the registry logs that it is lost, once
