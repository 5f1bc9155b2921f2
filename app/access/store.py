"""API keys in the registry, shared by every replica; its methods block."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any, Self

from sqlalchemy import insert, select, update

from boxcal.app.access.keys import SALT_BYTES, KeyRecord, digest_of, new_id, new_secret, written
from boxcal.app.http.problems import KeyNotFound
from boxcal.app.http.scopes import Scope
from boxcal.app.registry.audit import Action, Caller, append
from boxcal.app.registry.database import Database
from boxcal.app.registry.tables import api_keys, utc_now

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
        key_id, secret, salt = new_id(), new_secret(), secrets.token_bytes(SALT_BYTES)
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
