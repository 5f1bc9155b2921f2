"""API keys: how they are written, and how they are checked.

A key is ``boxcal_``, an id of 16 hexadecimal digits, ``_`` and a secret of 256 random bits in base64url. The
registry stores the id, a salt and SHA-256(salt + secret). A slow hash such as Argon2 protects secrets that
people choose, because these can be guessed. A secret of 256 random bits cannot be guessed at any speed, so
one SHA-256 is enough, and every request can afford it.

API keys in the registry, shared by every replica; its methods block.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Self

from sqlalchemy import insert, select, update

from boxcal.app.http.problems import KeyNotFound
from boxcal.app.http.scopes import Scope
from boxcal.app.registry.audit import Action, Caller, append
from boxcal.app.registry.database import Database
from boxcal.app.registry.tables import api_keys, utc_now

PREFIX = b"boxcal_"
ID_DIGITS = 16
SECRET_BYTES = 32
SALT_BYTES = 16
SECRET_STARTS = len(PREFIX) + ID_DIGITS + 1
KEY_LENGTH = SECRET_STARTS + 43
"""Of a whole key: 32 bytes are 43 characters of base64url without padding."""


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """An API key as the registry stores it; the secret is in no record."""

    id: str
    name: str
    salt: bytes
    digest: bytes  # SHA-256 of salt and secret
    scopes: frozenset[Scope]
    per_minute: int | None  # Limits of requests, for each replica; None for no limit
    concurrency: int | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None = None
    last_used_at: datetime | None = None


def written(key_id: str, secret: str) -> str:
    return f"{PREFIX.decode()}{key_id}_{secret}"


def digest_of(salt: bytes, secret: bytes) -> bytes:
    """Return SHA-256(salt + secret)."""
    return hashlib.sha256(salt + secret).digest()


def parts(key: bytes) -> tuple[bytes, bytes]:
    """Split a whole key into its id and secret; both are meaningless if it is not one."""
    return key[len(PREFIX) : SECRET_STARTS - 1], key[SECRET_STARTS:]


def matches(salt: bytes, digest: bytes, secret: bytes) -> bool:
    """Compare a secret with a stored digest, in a time that does not depend on where they differ."""
    return hmac.compare_digest(digest_of(salt, secret), digest)


def key_of(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the key of `Authorization: Bearer KEY` or `X-API-Key: KEY`; empty if there is none."""
    key = b""
    for name, value in headers:
        if name == b"authorization":
            if value[:7].lower() == b"bearer ":
                return value[7:].strip()
        elif name == b"x-api-key":
            key = value.strip()
    return key


_columns = [api_keys.c[field.name] for field in fields(KeyRecord)]


@dataclass(frozen=True, slots=True)
class CurrentKeys:
    """The keys that are not revoked."""

    keys: Sequence[KeyRecord]
    any_created: bool  # Whether a key was ever created; then requests need one, even if all were revoked
    now: datetime  # Time of the database, with which `expires_at` is compared


class KeyStore:
    """Creates, lists and revokes API keys."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @classmethod
    def at(cls, url: str) -> Self:
        """Open the registry at a URL, for the command line."""
        return cls(Database(url))

    def close(self) -> None:
        """Close the connections to the database."""
        self._database.close()

    def create(
        self,
        name: str,
        scopes: Collection[Scope],
        caller: Caller,
        *,
        valid_for: timedelta | None = None,
        per_minute: int | None = None,
        concurrency: int | None = None,
    ) -> tuple[KeyRecord, str]:
        """Create a key; returns its record, and the whole key, which is stored nowhere."""
        key_id, secret = secrets.token_hex(ID_DIGITS // 2), secrets.token_urlsafe(SECRET_BYTES)
        salt = secrets.token_bytes(SALT_BYTES)
        with self._database.write() as connection:
            now = connection.execute(select(utc_now())).scalar_one()
            connection.execute(
                insert(api_keys).values(
                    id=key_id,
                    name=name,
                    salt=salt,
                    digest=digest_of(salt, secret.encode()),
                    scopes=sorted(scopes),
                    per_minute=per_minute,
                    concurrency=concurrency,
                    created_at=now,
                    expires_at=None if valid_for is None else now + valid_for,
                )
            )
            granted = " ".join(sorted(scopes))
            append(connection, caller, Action.CREATE_KEY, f"key {key_id}", name=name, scopes=granted)
            row = connection.execute(select(*_columns).where(api_keys.c.id == key_id)).one()
        return _record(row._mapping), written(key_id, secret)

    def list(self) -> list[KeyRecord]:
        """Return every key, revoked ones included, oldest first."""
        with self._database.read() as connection:
            rows = connection.execute(select(*_columns).order_by(api_keys.c.created_at, api_keys.c.id))
            return [_record(row._mapping) for row in rows]

    def revoke(self, key_id: str, caller: Caller) -> None:
        """Revoke a key; revoking it again has no effect."""
        with self._database.write() as connection:
            found = connection.execute(
                select(api_keys.c.name, api_keys.c.revoked_at).where(api_keys.c.id == key_id)
            ).one_or_none()
            if found is None:
                raise KeyNotFound(f"No API key has the id {key_id!r}; `boxcal keys list` lists all.")
            if found.revoked_at is None:
                connection.execute(
                    update(api_keys).where(api_keys.c.id == key_id).values(revoked_at=utc_now())
                )
                append(connection, caller, Action.REVOKE_KEY, f"key {key_id}", name=found.name)

    def current(self) -> CurrentKeys:
        """Return the keys that requests may use now."""
        with self._database.read() as connection:
            valid = select(*_columns).where(api_keys.c.revoked_at.is_(None))
            keys = [_record(row._mapping) for row in connection.execute(valid)]
            any_created = bool(keys) or connection.execute(select(api_keys.c.id).limit(1)).first() is not None
            return CurrentKeys(keys, any_created, connection.execute(select(utc_now())).scalar_one())

    def used(self, ids: Collection[str]) -> None:
        """Record that keys were used now."""
        with self._database.write() as connection:
            connection.execute(update(api_keys).where(api_keys.c.id.in_(ids)).values(last_used_at=utc_now()))


def _record(row: Any) -> KeyRecord:
    return KeyRecord(**{**row, "scopes": frozenset(map(Scope, row["scopes"]))})
