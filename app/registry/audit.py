"""The audit log: who did what, when and from where. It is append-only, as a trigger of the database enforces.

An entry is added in the transaction of the change that it describes, so neither exists without the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sqlalchemy import Connection, insert, select, true

from boxcal.app.registry.database import Database
from boxcal.app.registry.tables import audit, utc_now


class Action(StrEnum):
    """What an entry of the audit log describes."""

    FIT = "fit"
    CANCEL = "cancel-fit"
    ACTIVATE = "activate"
    ROLLBACK = "rollback"
    CREATE_KEY = "create-key"
    REVOKE_KEY = "revoke-key"


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a change."""

    name: str  # Name of the API key, or what else acts
    key: str | None = None  # Id of the API key; None without one
    address: str = ""  # Where the request came from; empty for the service itself


SERVICE = Caller("the service")
"""Acts when a fit activates its calibrator."""


def append(
    connection: Connection, caller: Caller, action: Action, subject: str, **details: str | float
) -> None:
    """Add an entry in the transaction of a change."""
    values = {"action": action, "subject": subject, "details": details}
    connection.execute(
        insert(audit).values(
            at=utc_now(), actor=caller.name, key_id=caller.key, address=caller.address, **values
        )
    )


def entries(database: Database, limit: int, before: int | None = None) -> Sequence[Any]:
    """Return at most `limit` entries, newest first; only entries older than the one with the id `before`.

    Each has the members of `GET /audit`.
    """
    own = (audit.c.id, audit.c.at, audit.c.action, audit.c.subject, audit.c.address, audit.c.details)
    names = (audit.c.actor.label("name"), audit.c.key_id.label("key"))
    older = true() if before is None else audit.c.id < before
    newest = select(*own, *names).where(older).order_by(audit.c.id.desc()).limit(limit)
    with database.read() as connection:
        return connection.execute(newest).all()
