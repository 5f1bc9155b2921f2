"""Opens access at start-up: loads the keys, and refuses to serve everyone by mistake."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TYPE_CHECKING

from boxcal.app.access.access import Access, follow
from boxcal.app.access.browsers import is_loopback
from boxcal.app.access.local_keys import LocalKeys
from boxcal.app.access.store import KeyStore
from boxcal.app.http.problems import NoApiKey, RegistryUnavailable
from boxcal.app.observability.background import background
from boxcal.app.registry.store import Registry
from boxcal.app.settings.service import Settings

if TYPE_CHECKING:
    from boxcal.app.observability.telemetry import Telemetry


@asynccontextmanager
async def open_access(settings: Settings, registry: Registry, telemetry: Telemetry) -> AsyncIterator[Access]:
    """Load the keys and follow their changes; the last uses are recorded at the end.

    Raises
    ------
    NoApiKey
        The service listens on an address that others reach, and has no key.
    RegistryUnavailable
        The database does not answer, and the data folder has no copy of the keys.
    """
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

        async def next_keys() -> tuple[int, int]:
            return (await registry.snapshots.next()).keys

        await stack.enter_async_context(
            background("keys", lambda: follow(access, registry.run, next_keys), telemetry)
        )
        yield access


async def _record_last_uses(access: Access, registry: Registry) -> None:
    with suppress(RegistryUnavailable):
        await registry.run(access.record_uses)
