"""The database of the registry: opened on first use, migrated, and entered by short transactions.

Threads of the registry's own call it, so a database that hangs blocks these and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from enum import IntEnum
from pathlib import Path
from sqlite3 import OperationalError as SqliteError
from typing import Any, ParamSpec, TypeVar

import orjson
from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from boxcal.app.http.problems import BoxcalError, RegistryFull, RegistryUnavailable, RegistryUnusable
from boxcal.app.registry.tables import HEAD, create_schema

logger = logging.getLogger("boxcal")

GAP_SECONDS = 10.0

P = ParamSpec("P")
T = TypeVar("T")


class Availability:
    """Whether a database answers; only changes are logged. Its methods may be called from any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._answered = self._steady_from = time.monotonic()
        self._failed = self._lost_from = 0.0
        self._is_lost = False

    def made(self) -> None:
        """Record that the database answered."""
        with self._lock:
            now = time.monotonic()
            gap, was_lost, self._is_lost = now - self._answered, self._is_lost, False
            if was_lost or gap > GAP_SECONDS:
                self._steady_from = now
            self._answered = now
        if was_lost:
            logger.warning(
                "The registry at %s answers again after %.0f s.", self._name, now - self._lost_from
            )

    def lost(self, reason: str) -> None:
        """Record that the database did not answer."""
        with self._lock:
            was_lost, self._is_lost = self._is_lost, True
            self._failed = time.monotonic()
            if not was_lost:
                self._lost_from = self._failed
        if not was_lost:
            logger.warning("The registry at %s does not answer: %s", self._name, reason)

    def failed_after(self, moment: float) -> bool:
        """Whether the database is lost, and failed to answer after a moment of `time.monotonic`."""
        return self._is_lost and self._failed > moment

    def seconds_since_answer(self) -> float:
        """Seconds since the last answer."""
        return time.monotonic() - self._answered

    def seconds_without_gap(self) -> float:
        """Seconds over which the database has answered without a gap."""
        return self._answered - self._steady_from


CONNECTIONS = 2
"""Connections of the pool, each with a thread. On PostgreSQL one more listens for changes."""
ENGINE_OPTIONS: dict[str, Any] = {
    "json_serializer": lambda value: orjson.dumps(value).decode(),
    "json_deserializer": orjson.loads,
    "pool_size": 1,
    "max_overflow": CONNECTIONS - 1,
}
MIGRATION_SECONDS = 60.0
BUSY_SECONDS = 15.0
PAGE_BYTES = 16_384
"""Of a new SQLite file: blocks of predictions are large, and each page of them costs."""
DISK_FULL = "53100"
"""PostgreSQL's code of the error."""
FIRST = "0012"
"""Of the first release, 0.3.0."""
STEPS: Mapping[str, Callable[[Connection], None]] = {}
"""What each later revision adds, in order; the last one is `HEAD`."""
NEXT = f"{int(HEAD) + 1:04}"
"""The next release's revision: a step only adds, so that this release works on its tables."""
LEADER_LOCK = 0x6C656164
"""First key of the advisory locks of `leads`; the second names the work."""
MIGRATION_LOCK = 0x626F7863616C  # "boxcal": replicas that start together migrate one after the other
SQLITE_UNAVAILABLE = (
    "SQLITE_BUSY",
    "SQLITE_LOCKED",
    "SQLITE_IOERR",
    "SQLITE_FULL",
    "SQLITE_CANTOPEN",
    "SQLITE_READONLY",
)
REFUSALS = (
    "SQLITE_READONLY",
    "SQLITE_CORRUPT",
    "25006",  # Read-only: a standby, or storage at its limit
    "25P03",  # A session or a transaction took too long
    "25P04",
    "42501",  # A right was taken away, as some providers do at the limit of the storage
    "XX",  # Data that are damaged
)
"""Errors of a database that was open and answers, but not to this transaction: it may do so later."""


class Leader(IntEnum):
    """Work that one replica at a time does."""

    INTERRUPT = 1
    PRUNE = 2


class Database:
    """A SQLite file or a PostgreSQL database with the tables of this release.

    `url`: SQLAlchemy URL. The folder of a SQLite file is created.
    """

    def __init__(self, url: str, *, migrate: bool = True) -> None:
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError) as error:
            raise RegistryUnusable(f"BOXCAL_DATABASE_URL is not a database URL: {error}") from error
        if parsed.get_backend_name() == "postgres":
            raise RegistryUnusable("BOXCAL_DATABASE_URL begins with postgres://: write postgresql://")
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        if self.is_sqlite and parsed.database in {None, "", ":memory:"}:
            raise RegistryUnusable("BOXCAL_DATABASE_URL names no file: write sqlite:////PATH/boxcal.db")
        self._shown = parsed.render_as_string(hide_password=True)
        self.availability = Availability(self._shown)
        # Apart, as one that is read-only answers to what only reads.
        self._changes = Availability(self._shown)
        self._prepare: list[Callable[[Connection], None]] = []
        self._may_migrate = migrate or self.is_sqlite
        self._is_open = False
        self._file: tuple[int, int] | None = None
        self._of_thread = threading.local()
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="registry")
        try:
            self.engine = _sqlite(parsed) if self.is_sqlite else _postgresql(parsed)
        except (SQLAlchemyError, OSError, ImportError) as error:
            raise self._unusable(error) from error
        self._writing = self.engine.execution_options(writes=True)
        # One statement needs no transaction around it: three round trips less, a thousand replicas long.
        single = {} if self.is_sqlite else {"isolation_level": "AUTOCOMMIT", "autocommit": True}
        self._autocommit = self.engine.execution_options(**single)

    def prepare(self, work: Callable[[Connection], None]) -> None:
        """Do some work in the transaction of the migrations and after them, whenever they run."""
        self._prepare.append(work)
        self._is_open = False

    def open(self) -> None:
        """Apply missing migrations; `read` and `write` do so on first use."""
        try:
            with self._transaction(self._writing.execution_options(seconds=MIGRATION_SECONDS)) as connection:
                if not self.is_sqlite:
                    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": MIGRATION_LOCK})
                migrate_tables(connection, self._shown, may_migrate=self._may_migrate)
                for work in list(self._prepare):
                    work(connection)
        except SQLAlchemyError as error:
            raise self._unusable(error) from error
        self._file = self._file_now()
        self._is_open = True

    def _file_now(self) -> tuple[int, int] | None:
        """Identify the file that the path of a SQLite registry leads to."""
        try:
            found = Path(str(self.engine.url.database)).stat() if self.is_sqlite else None
        except OSError:
            return None
        return found and (found.st_dev, found.st_ino)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One consistent view; within a transaction of this thread, what that sees.

        A second connection could be one that waits for this very transaction, until it gives up.
        """
        if (connection := getattr(self._of_thread, "connection", None)) is not None:
            yield connection
            return
        if not self._is_open:
            self.open()
        with self._transaction(self.engine) as connection:
            yield connection

    @contextmanager
    def read_one(self) -> Iterator[Connection]:
        """Read by a single statement."""
        if not self._is_open:
            self.open()
        with self._transaction(self._autocommit) as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction: committed whole, or not at all."""
        if not self._is_open:
            self.open()
        with self._transaction(self._writing) as connection:
            self._of_thread.connection = connection
            try:
                yield connection
            finally:
                del self._of_thread.connection

    def compact(self) -> None:
        """Return the space of deleted data to the disk. SQLite only: PostgreSQL does so itself."""
        if self.is_sqlite:
            with closing(self.engine.raw_connection()) as connection:
                try:
                    connection.cursor().execute("VACUUM")
                except SqliteError as error:
                    raise RegistryFull(f"Deleted, but the file is as large as before: {error}") from error

    async def run(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        """Call something that uses the database, in a thread."""
        asked = time.monotonic()

        def work() -> T:
            if self.availability.failed_after(asked):
                raise RegistryUnavailable("The registry does not answer.")
            return call(*arguments, **named)

        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Wait for the calls that run, drop those that wait, and close the connections."""
        self._threads.shutdown(cancel_futures=True)
        self.engine.dispose()

    @contextmanager
    def _transaction(self, engine: Engine) -> Iterator[Connection]:
        if self.is_sqlite and self._is_open and self._file_now() != self._file:
            # The open file has no name any more: what is written to it would be lost.
            reason = "its file was removed or replaced while it was in use; restart the service"
            self.availability.lost(reason)
            raise RegistryUnavailable(f"The registry does not answer: {reason}.")
        try:
            with engine.begin() as connection:
                try:
                    yield connection
                except DBAPIError as error:
                    if self._refuses(error) and not self.is_sqlite:
                        connection.invalidate()  # a new session may reach another server or have more rights
                    raise
        except (DBAPIError, PoolTimeout) as error:
            refuses = self._refuses(error)
            if not refuses and not _is_lost(error):
                raise
            reason = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
            if _code(error) in ("SQLITE_FULL", DISK_FULL):
                raise RegistryFull(f"The registry cannot store more: {reason}") from error
            (self._changes if refuses else self.availability).lost(reason)
            raise RegistryUnavailable(f"The registry does not answer: {reason}") from error
        self.availability.made()
        if engine is self._writing:
            self._changes.made()

    def _refuses(self, error: DBAPIError | PoolTimeout) -> bool:
        return self._is_open and _code(error).startswith(REFUSALS)

    def leads(self, connection: Connection, work: Leader) -> bool:
        """Whether this transaction does some work that one replica at a time does, until its end."""
        if self.is_sqlite:
            return True
        keys = {"leader": LEADER_LOCK, "work": work.value}
        got = connection.execute(text("SELECT pg_try_advisory_xact_lock(:leader, :work)"), keys)
        return bool(got.scalar_one())

    def notify(self, connection: Connection) -> None:
        """Wake the replicas that listen, once the transaction is committed."""
        if not self.is_sqlite:
            connection.execute(text("NOTIFY boxcal"))

    def _unusable(self, error: Exception) -> BoxcalError:
        return RegistryUnusable(f"The registry at {self._shown} cannot be opened: {error}")


def _code(error: DBAPIError | PoolTimeout) -> str:
    cause = getattr(error, "orig", None)
    return getattr(cause, "sqlite_errorname", None) or getattr(cause, "sqlstate", None) or ""


def _is_lost(error: DBAPIError | PoolTimeout) -> bool:
    if isinstance(error, DBAPIError) and isinstance(error.orig, SqliteError):
        return _code(error).startswith(SQLITE_UNAVAILABLE)
    return isinstance(error, (OperationalError, InterfaceError, PoolTimeout))


def check_revision(connection: Connection, shown: str) -> str | None:
    """Return the revision of the tables; None where there are none."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    if revision in (FIRST, *STEPS, HEAD, NEXT, None):
        return revision
    raise RegistryUnusable(
        f"The registry at {shown} is at revision {revision!r}; this release accepts {HEAD!r} and "
        f"{NEXT!r}. If a newer release wrote it, start that or restore a copy. Tables of versions before "
        "0.3.0 are not upgraded: start with a new database."
    )


def migrate_tables(connection: Connection, shown: str, *, may_migrate: bool) -> None:
    """Create the tables, or add what the steps after their revision add, in the caller's transaction."""
    revision = check_revision(connection, shown)
    if revision in (HEAD, NEXT):
        return
    if not may_migrate:
        raise RegistryUnusable(
            f"The registry at {shown} is at revision {revision!r}, this release needs {HEAD!r}, "
            "and BOXCAL_MIGRATE is off. Run `boxcal migrate` first."
        )
    if revision is None:
        create_schema(connection)
        return
    for later in (step for step in STEPS if step > revision):
        STEPS[later](connection)
    connection.execute(text("UPDATE alembic_version SET version_num = :head"), {"head": HEAD})


def _sqlite(url: URL) -> Engine:
    Path(str(url.database)).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, **ENGINE_OPTIONS)

    @event.listens_for(engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        # The driver's own transactions begin late and exclude schema changes: `begin` replaces them.
        connection.isolation_level = None
        connection.create_function("utc_now", 0, lambda: f"{datetime.now(UTC):%F %T.%f}")
        connection.create_function("seconds_now", 0, time.time)
        connection.executescript(
            f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}; PRAGMA page_size = {PAGE_BYTES}; "
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON; "
            # Some builds overwrite what is deleted, which doubles what feedback writes.
            "PRAGMA secure_delete = OFF;"
        )

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # A writer takes the lock at once: upgrading a read lock later would fail instead of waiting.
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _postgresql(url: URL) -> Engine:
    try:
        from boxcal.app.registry.postgresql import open_engine  # noqa: PLC0415 - a registry on SQLite needs no psycopg
    except ModuleNotFoundError as error:
        raise RegistryUnusable(
            f"PostgreSQL needs the package {error.name}: pip install 'boxcal[postgres]'."
        ) from error
    return open_engine(url, **ENGINE_OPTIONS)
