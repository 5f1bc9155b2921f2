"""Decides which requests may pass, from keys in memory; no request waits for the database.

A copy of the keys in the data folder, for a start while the registry does not answer.

Opens access at start-up, and follows changes of the keys, which take effect within seconds.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from boxcal.app.access.keys import (
    KEY_LENGTH,
    PREFIX,
    SALT_BYTES,
    CurrentKeys,
    KeyRecord,
    KeyStore,
    key_of,
    matches,
    parts,
)
from boxcal.app.http.browsers import is_loopback
from boxcal.app.http.limits import Limiter
from boxcal.app.http.problems import (
    ApiKeyExpired,
    ApiKeyRequired,
    InsufficientScope,
    InvalidApiKey,
    NoApiKey,
    RegistryUnavailable,
)
from boxcal.app.http.scopes import Requirement, Scope, permitted
from boxcal.app.observability.supervised_task import background
from boxcal.app.registry.storage import LocalCopy
from boxcal.app.registry.store import Registry
from boxcal.app.settings.service import Settings

if TYPE_CHECKING:
    from boxcal.app.observability.telemetry import Telemetry


logger = logging.getLogger("boxcal")

FILE_NAME = "keys.json"


class LocalKeys:
    """One JSON file, which only the owner may read; it has salts and digests, as the registry does."""

    def __init__(self, data_dir: Path) -> None:
        self._copy = LocalCopy(data_dir / FILE_NAME, mode=0o600)

    def write(self, current: CurrentKeys) -> None:
        """Replace the copy if a key was added, changed or revoked; a failure is logged, nothing else."""
        keys = [replace(record, last_used_at=None) for record in current.keys]
        document = {"keys": keys, "any_created": current.any_created}
        self._copy.write(orjson.dumps(document, default=_written), "the API keys")

    def read(self) -> CurrentKeys | None:
        """Return the keys of the copy; None where there is none, or it is not what was written."""
        try:
            data = self._copy.read()
            if data is None:
                return None
            document = orjson.loads(data)
            keys = [_record(entry) for entry in document["keys"]]
            # The database gives no time.
            return CurrentKeys(keys, bool(document["any_created"]), datetime.now(UTC))
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("%s cannot be read: %s", self._copy.path, error)
            return None


def _written(value: bytes | frozenset[Scope]) -> object:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else sorted(value)


def _record(entry: dict[str, Any]) -> KeyRecord:
    values = dict(entry)
    for name in ("salt", "digest"):
        values[name] = base64.b64decode(entry[name])
    for name in ("created_at", "expires_at"):
        values[name] = entry[name] and datetime.fromisoformat(entry[name])
    values["scopes"] = frozenset(map(Scope, entry["scopes"]))
    return KeyRecord(**values)


_NO_SALT, _NO_DIGEST = bytes(SALT_BYTES), bytes(32)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedKey:
    """A key in memory."""

    record: KeyRecord
    permits: frozenset[Requirement]
    deadline: float | None  # When it expires, as a moment of `time.monotonic`; None if it does not
    limiter: Limiter | None  # None if it has no limits

    @property
    def has_expired(self) -> bool:
        return self.deadline is not None and time.monotonic() >= self.deadline


GUESS_SECONDS, MOST_ADDRESSES = 60.0, 10_000
FREE_GUESSES, WAIT_STEP, LONGEST_WAIT = 5, 0.05, 2.0


class Access:
    """The keys in memory, and what they permit; used by the event loop, except `load`.

    `copy`: keeps the keys for a start while the registry does not answer; None where the registry is a file.
    """

    def __init__(self, store: KeyStore, copy: LocalKeys | None, *, is_open_to_others: bool) -> None:
        self._store = store
        self._copy = copy
        self._keys: dict[bytes, LoadedKey] = {}
        self._used: set[str] = set()
        self._is_open_to_others = is_open_to_others
        self._guesses: Counter[str] = Counter()
        self._guesses_since = time.monotonic()
        self.is_required = is_open_to_others
        try:
            self.load()
        except RegistryUnavailable:
            kept = None if copy is None else copy.read()
            if kept is None:
                raise
            self._hold(kept)

    @property
    def has_keys(self) -> bool:
        """Whether a valid key exists."""
        return bool(self._keys)

    def admit(self, headers: list[tuple[bytes, bytes]], requirement: Requirement) -> LoadedKey:
        """Return the key of a request that may pass; call `limiter.leave` at its end if it has one."""
        given = key_of(headers)
        if not given:
            raise ApiKeyRequired(
                "The request has no API key: send `Authorization: Bearer KEY` or `X-API-Key: KEY`."
            )
        key_id, secret = parts(given)
        is_written_as_one = len(given) == KEY_LENGTH and given.startswith(PREFIX)
        key = self._keys.get(key_id) if is_written_as_one else None
        salt, digest = (_NO_SALT, _NO_DIGEST) if key is None else (key.record.salt, key.record.digest)
        # An unknown id takes as long as a wrong secret.
        if not matches(salt, digest, secret) or key is None:
            raise InvalidApiKey("The API key is not valid: it is unknown, or was revoked.")
        if key.has_expired:
            raise ApiKeyExpired(f"The API key {key.record.id} expired at {key.record.expires_at:%F %T} UTC.")
        if requirement not in key.permits:
            raise InsufficientScope(
                f"The API key {key.record.id} has the scopes {' '.join(sorted(key.record.scopes))}; "
                f"this requires {requirement}."
            )
        if key.limiter is not None:
            key.limiter.enter()
        self._used.add(key.record.id)
        return key

    def holds(self, key: LoadedKey | None) -> bool:
        """Whether a key that was admitted still would be: it has not been revoked, and has not expired."""
        if key is None:
            return not self.is_required
        known = self._keys.get(key.record.id.encode())
        return known is not None and not key.has_expired

    def guessed(self, address: str) -> float:
        """Note a wrong key from an address, which is logged once a minute; return how long its answer waits.

        The sixth of a minute waits 50 ms, and each later one 50 ms more, up to two seconds: a program that
        tries keys learns little, and who mistypes one waits for nothing.
        """
        now = time.monotonic()
        if now - self._guesses_since >= GUESS_SECONDS or len(self._guesses) >= MOST_ADDRESSES:
            self._guesses, self._guesses_since = Counter(), now
        self._guesses[address] += 1
        if self._guesses[address] == 1:
            logger.warning("An API key from %s is not valid; more within a minute are counted.", address)
        return min(LONGEST_WAIT, max(0, self._guesses[address] - FREE_GUESSES) * WAIT_STEP)

    def load(self) -> None:
        """Read the keys from the registry; blocks."""
        current = self._store.current()
        self._hold(current)
        if self._copy is not None:
            self._copy.write(current)

    def record_uses(self) -> None:
        """Record in the registry which keys were used since the last call; blocks."""
        used, self._used = self._used, set()
        if used:
            self._store.used(used)

    def _hold(self, current: CurrentKeys) -> None:
        now = time.monotonic()
        keys: dict[bytes, LoadedKey] = {}
        for record in current.keys:
            expires = record.expires_at
            deadline = None if expires is None else now + (expires - current.now).total_seconds()
            keys[record.id.encode()] = LoadedKey(
                record, permitted(record.scopes), deadline, self._limiter(record)
            )
        self._keys = keys
        self.is_required = self._is_open_to_others or current.any_created

    def _limiter(self, record: KeyRecord) -> Limiter | None:
        """Return the limiter that counts for the key already, or a new one."""
        limits = (record.per_minute, record.concurrency)
        if limits == (None, None):
            return None
        loaded = self._keys.get(record.id.encode())
        known = loaded is not None and loaded.limiter is not None and loaded.limiter.limits == limits
        return loaded.limiter if loaded is not None and known else Limiter(*limits)


def check_openness(settings: Settings, *, has_keys: bool) -> None:
    """Refuse an address that other machines reach while no key exists and nobody said that none is needed."""
    if not (has_keys or settings.allow_anonymous or is_loopback(settings.address)):
        raise NoApiKey(
            f"BOXCAL_HOST is {settings.host}, which other machines reach, and the registry has no valid "
            "API key. Create one with `boxcal keys create NAME --scope admin`, or set "
            "BOXCAL_ALLOW_ANONYMOUS=1 to serve everyone."
        )


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
    check_openness(settings, has_keys=access.has_keys)
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
