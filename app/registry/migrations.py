"""The revision of a registry's tables, and the steps that bring an older one up to this release.

A step only adds, so that the release before works on its tables: it accepts the next revision as well.
A new database gets its tables from `boxcal.app.registry.tables`, without a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sqlalchemy import Connection, inspect, text

from boxcal.app.http.problems import RegistryUnusable
from boxcal.app.registry.tables import HEAD, create_schema

FIRST = "0012"
"""Of the first release, 0.3.0."""
STEPS: Mapping[str, Callable[[Connection], None]] = {}
"""What each later revision adds, in order; the last one is `HEAD`."""
NEXT = f"{int(HEAD) + 1:04}"
"""The next release's revision."""


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
