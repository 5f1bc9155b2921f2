"""Decides which requests may pass, from keys in memory; no request waits for the database."""

from __future__ import annotations

import time

from boxcal.app.access.keys import KEY_LENGTH, PREFIX, SALT_BYTES, KeyRecord, key_of, matches, parts
from boxcal.app.access.local_keys import LocalKeys
from boxcal.app.access.store import CurrentKeys, KeyStore
from boxcal.app.http.limits import Limiter
from boxcal.app.http.problems import (
    ApiKeyExpired,
    ApiKeyRequired,
    InsufficientScope,
    InvalidApiKey,
    RegistryUnavailable,
)
from boxcal.app.http.scopes import Requirement, permitted

_NO_SALT, _NO_DIGEST = bytes(SALT_BYTES), bytes(32)


class LoadedKey:
    """A key in memory.

    `deadline`: when it expires, as a moment of `time.monotonic`; None if it does not. `limiter`: None if it
    has no limits.
    """

    __slots__ = ("deadline", "limiter", "permits", "record")

    def __init__(self, record: KeyRecord, deadline: float | None, limiter: Limiter | None) -> None:
        self.record = record
        self.deadline = deadline
        self.permits = permitted(record.scopes)
        self.limiter = limiter


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
        if key.deadline is not None and time.monotonic() >= key.deadline:
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
            keys[record.id.encode()] = LoadedKey(record, deadline, self._limiter(record))
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
