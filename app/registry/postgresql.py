"""PostgreSQL for the registry: an engine with bounded waits, and a connection for notifications."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
from psycopg.pq import TransactionStatus
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL

CONNECT_SECONDS = 2
ANSWER_SECONDS = 3.0
"""How long a statement may take; the server enforces it and, in case it hangs, the client."""
CHANNEL = "boxcal"
CONNECT_ARGUMENTS: dict[str, Any] = {
    "connect_timeout": CONNECT_SECONDS,
    # Statements are never prepared: PgBouncer in transaction mode gives each transaction another session.
    "prepare_threshold": None,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
}


class BoundedConnection(psycopg.Connection[Any]):
    """A connection whose waits for the server are bounded, so that a server that hangs blocks no thread."""

    seconds: float = ANSWER_SECONDS  # The bound. A connection whose answer is overdue is closed.

    def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
        """Wait for the server as `psycopg.Connection.wait` does, at most `seconds`."""
        try:
            return super().wait(gen, interval, self.seconds if timeout is None else timeout)
        except psycopg.OperationalError:
            if self.info.transaction_status is TransactionStatus.ACTIVE:
                self.close()
            raise


def open_engine(url: URL, **options: Any) -> Engine:
    """Create an engine on bounded connections.

    The execution option `seconds` is the bound of a transaction; `autocommit` stands for a single statement,
    which needs none of the settings of a transaction.
    """
    engine = create_engine(
        url, connect_args=CONNECT_ARGUMENTS, pool_pre_ping=True, pool_timeout=ANSWER_SECONDS, **options
    )

    @event.listens_for(engine, "do_connect")
    def connect(_dialect: Any, _record: Any, positional: Any, named: Any) -> Any:
        return BoundedConnection.connect(*positional, **named)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        seconds = connection.get_execution_options().get("seconds", ANSWER_SECONDS)
        # The pool's wrapper would keep the attribute to itself.
        bounded: Any = connection.connection.dbapi_connection
        bounded.seconds = seconds
        if connection.get_execution_options().get("autocommit", False):
            return
        connection.exec_driver_sql(
            f"SET LOCAL statement_timeout = {int(1000 * seconds)}; "
            f"SET LOCAL idle_in_transaction_session_timeout = {int(10_000 * seconds)}"
        )

    return engine


async def listen(engine: Engine) -> psycopg.AsyncConnection[Any]:
    """Open a connection that receives the notifications of `CHANNEL`."""
    _, named = engine.dialect.create_connect_args(engine.url)
    arguments: dict[str, Any] = {**named, **CONNECT_ARGUMENTS, "autocommit": True}
    connection = await psycopg.AsyncConnection.connect(**arguments)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await connection.execute(f"LISTEN {CHANNEL}".encode())
    except BaseException:
        await connection.close()
        raise
    return connection
