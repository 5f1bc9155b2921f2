"""The one database: opened, brought up to date, and entered by short transactions that read or write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from boxcal.app.registry.errors import RegistryUnusable
from boxcal.app.registry.migrations import HEAD

BUSY_SECONDS = 15.0
MIGRATION_LOCK = 0x626F7863616C  # "boxcal": replicas that start together migrate one after the other


class Database:
    """A SQLite file or a PostgreSQL database, with the tables of this release.

    Parameters
    ----------
    url
        SQLAlchemy URL. The folder of a SQLite file is made where it is missing.

    Raises
    ------
    RegistryUnusable
        The URL cannot be read, the database cannot be reached, or it was written by a newer release.
    """

    def __init__(self, url: str) -> None:
        parsed = _parse(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self._shown = parsed.render_as_string(hide_password=True)
        try:
            if self.is_sqlite and parsed.database:
                Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
            self._engine = create_engine(parsed, json_serializer=_dumps, json_deserializer=orjson.loads)
            if self.is_sqlite:
                event.listen(self._engine, "connect", _prepare_sqlite)
                event.listen(self._engine, "begin", _begin_sqlite)
            self._writing = self._engine.execution_options(writes=True)
            self._migrate()
        except (SQLAlchemyError, OSError, ImportError) as error:
            raise RegistryUnusable(f"The registry at {self._shown} cannot be opened: {error}") from error

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent view."""
        with self._engine.begin() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction: committed whole, or not at all."""
        with self._writing.begin() as connection:
            yield connection

    def close(self) -> None:
        """Give every connection back."""
        self._engine.dispose()

    def _migrate(self) -> None:
        with self.read() as connection:
            if _revision(connection) == HEAD:
                return
        with self.write() as connection:
            if not self.is_sqlite:
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
            revision = _revision(connection)
            if revision != HEAD:
                self._upgrade(connection, revision)

    def _upgrade(self, connection: Connection, revision: str | None) -> None:
        # Loaded only by the first start after an upgrade: Alembic costs every other start for nothing.
        from alembic import command  # noqa: PLC0415
        from alembic.config import Config  # noqa: PLC0415
        from alembic.script import ScriptDirectory  # noqa: PLC0415

        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", "boxcal.app.registry:migrations")
        known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
        if revision is not None and revision not in known:
            raise RegistryUnusable(
                f"The registry at {self._shown} is at revision {revision!r}, written by a newer release; "
                f"this one knows revisions up to {HEAD!r}. Start the newer release, or restore a copy."
            )
        command.upgrade(config, "head")


def _parse(url: str) -> URL:
    try:
        return make_url(url)
    except ArgumentError as error:
        raise RegistryUnusable(f"BOXCAL_DATABASE_URL is not a database URL: {error}") from error


def _dumps(value: Any) -> str:
    return orjson.dumps(value).decode()


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _prepare_sqlite(dbapi_connection: Any, _record: Any) -> None:
    # The driver's own transactions begin late and leave schema changes outside: `_begin_sqlite` takes over.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A writer takes the lock at once: one that upgrades a read lock late fails instead of waiting its turn.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
