"""The state of the registry in one short statement, which every process executes every two seconds.

Tasks that follow one part, such as the keys or the feedback log, read the last snapshot and execute no
statement themselves, so that a thousand idle replicas cost their database little. PostgreSQL notifies the
processes of changes, which they then see sooner.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import Integer, ScalarSelect, Select, String, bindparam, exists, func, select, text

from boxcal.app.registry.database import Database
from boxcal.app.registry.fits import ADOPTED_AFTER
from boxcal.app.registry.records import UNFINISHED
from boxcal.app.registry.tables import activations, api_keys, feedback_logs, fits, monitors

if TYPE_CHECKING:
    import psycopg

_POSTGRESQL = text("SELECT * FROM boxcal_snapshot(:backbone, :process, :overdue)")


def _statement() -> Select[Any]:
    """Build the same for SQLite, where another owner of a fit is dead, or shares the data folder."""
    backbone, process = bindparam("backbone", type_=Integer), bindparam("process", type_=String)
    unfinished = (fits.c.backbone_id == backbone) & fits.c.state.in_(UNFINISHED)
    return select(
        select(func.max(activations.c.id)).where(activations.c.backbone_id == backbone).scalar_subquery(),
        exists().where(unfinished, fits.c.owner != process),
        exists().where(unfinished, fits.c.owner == process, fits.c.cancel_requested),
        select(func.count()).select_from(api_keys).scalar_subquery(),
        select(func.count(api_keys.c.revoked_at)).scalar_subquery(),
        select(feedback_logs.c.seq).where(feedback_logs.c.backbone_id == backbone).scalar_subquery(),
        select(monitors.c.revision).where(monitors.c.backbone_id == backbone).scalar_subquery(),
    )


_SQLITE = _statement()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The registry at one moment."""

    activation: int  # Number of the last activation for this backbone; 0 before any
    # Whether a fit has no owner, or one without a sign of life or, with SQLite, is another process
    is_abandoned: bool
    is_cancelled: bool  # Whether the cancellation of a fit of this process was requested
    keys: tuple[int, int]  # How many API keys were created, and how many revoked
    seq: int  # Of the feedback log and of the monitor
    revision: int


class Snapshots:
    """Takes snapshots, and keeps the last one.

    `last`: the newest snapshot; None before the first.
    """

    def __init__(self, database: Database, backbone_id: ScalarSelect[int], owner: str) -> None:
        self._database = database
        self._backbone_id = backbone_id
        self._owner = owner
        self._resolved: int | None = None
        self._changed = asyncio.Event()
        self.last: Snapshot | None = None

    def take(self, overdue: timedelta = ADOPTED_AFTER) -> Snapshot:
        """Execute the statement; blocks."""
        if self._resolved is None:
            with self._database.read() as connection:
                self._resolved = connection.execute(select(self._backbone_id)).scalar_one()
        values: dict[str, Any] = {"backbone": self._resolved, "process": self._owner}
        if not self._database.is_sqlite:
            values["overdue"] = overdue
        with self._database.read_one() as connection:
            row = connection.execute(_SQLITE if self._database.is_sqlite else _POSTGRESQL, values).one()
        activation, is_abandoned, is_cancelled, created, revoked, seq, revision = row
        self.last = Snapshot(
            activation or 0, is_abandoned, is_cancelled, (created, revoked), seq or 0, revision or 0
        )
        return self.last

    def announce(self) -> None:
        """Wake the tasks that wait in `next`; called on the event loop after each `take`."""
        waiting, self._changed = self._changed, asyncio.Event()
        waiting.set()

    async def next(self) -> Snapshot:
        """Wait for the next snapshot."""
        while True:
            await self._changed.wait()
            if self.last is not None:
                return self.last


SPREAD_SECONDS = 0.1
"""Replicas react to one notification at different moments, so that they do not query all at once."""
RECONNECT_SECONDS = 30.0


class Notifications:
    """One connection that listens, if the registry is on PostgreSQL; without it, waiting is polling.

    Behind PgBouncer in transaction mode no notification arrives, and `wait` always takes its full time.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._connect_from = 0.0

    async def wait(self, seconds: float) -> None:
        """Wait for a notification, at most `seconds`."""
        if self._database.is_sqlite:
            await asyncio.sleep(seconds)
            return
        # A registry on SQLite starts sooner without.
        import psycopg  # noqa: PLC0415

        from boxcal.app.registry.postgresql import listen  # noqa: PLC0415

        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        try:
            if self._connection is None and loop.time() >= self._connect_from:
                self._connect_from = loop.time() + RECONNECT_SECONDS
                self._connection = await listen(self._database.engine)
            if self._connection is not None:
                left = max(0.0, until - loop.time())
                async for _ in self._connection.notifies(timeout=left, stop_after=1):
                    await asyncio.sleep(random.uniform(0, SPREAD_SECONDS))  # noqa: S311 - no secret
                return
        except (psycopg.Error, OSError):
            await self.close()
        await asyncio.sleep(max(0.0, until - loop.time()))

    async def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()
