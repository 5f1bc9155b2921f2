"""Migration, and pruning, which deletes the large parts of old calibrators; their rows stay."""

from __future__ import annotations

from contextlib import closing
from datetime import timedelta

from sqlalchemy import func, inspect, null, select, update

from boxcal.app.registry.database import Database, Leader, check_revision
from boxcal.app.registry.tables import (
    HEAD,
    PRUNED_PARTS,
    activations,
    api_keys,
    backbones,
    calibrators,
    utc_now,
)


def prune(
    database: Database, *, keep_versions: int, keep_days: float, leader_only: bool = False
) -> list[int]:
    """Delete the parts of old calibrators of every backbone, and return their versions.

    Kept are, for each backbone, the newest `keep_versions`, those that were active in the last `keep_days`,
    the active one, and the one that a rollback would return to. With `leader_only`, nothing is done while
    another replica prunes.
    """
    with database.write() as connection:
        if leader_only and not database.leads(connection, Leader.PRUNE):
            return []
        # In the order that activations lock them: none becomes active while it is pruned.
        connection.execute(select(backbones.c.id).order_by(backbones.c.id).with_for_update())
        since = connection.execute(select(utc_now())).scalar_one() - timedelta(days=keep_days)
        spans = select(
            activations.c.version,
            activations.c.previous,
            func.lead(activations.c.created_at)
            .over(partition_by=activations.c.backbone_id, order_by=activations.c.id)
            .label("ended"),
        ).subquery()
        active = select(spans.c.version).where(spans.c.ended.is_(None) | (spans.c.ended >= since))
        before = select(spans.c.previous).where(spans.c.ended.is_(None), spans.c.previous.is_not(None))
        target = select(activations.c.version).where(activations.c.id.in_(before))
        ranked = select(
            calibrators.c.version,
            func.row_number()
            .over(partition_by=calibrators.c.backbone_id, order_by=calibrators.c.version.desc())
            .label("rank"),
        ).subquery()
        newest = select(ranked.c.version).where(ranked.c.rank <= keep_versions)
        old = (
            calibrators.c.artifact.is_not(None)
            & calibrators.c.version.not_in(active)
            & calibrators.c.version.not_in(target)
            & calibrators.c.version.not_in(newest)
        )
        pruned = connection.execute(
            update(calibrators)
            .where(old)
            .values(pruned_at=utc_now(), **dict.fromkeys(PRUNED_PARTS, null()))
            .returning(calibrators.c.version)
        )
        return sorted(pruned.scalars())


def look(url: str) -> tuple[int, bool]:
    """Look into the registry at a URL, and change nothing; its waits are bounded.

    Returns how many tables it has, which this release can read, and whether an API key is valid.
    """
    with closing(Database(url)) as database, database.engine.connect() as connection:
        check_revision(connection, database.engine.url.render_as_string())
        tables = inspect(connection).get_table_names()
        valid = select(api_keys.c.id).where(api_keys.c.revoked_at.is_(None)).limit(1)
        return len(tables), api_keys.name in tables and connection.execute(valid).first() is not None


def migrate(url: str) -> str:
    """Apply missing migrations to the registry at a URL, and return its revision."""
    with closing(Database(url)) as database, database.read() as connection:
        return check_revision(connection, url) or HEAD


def prune_and_compact(url: str, *, keep_versions: int, keep_days: float) -> list[int]:
    """Prune the registry at a URL, and return the space of a SQLite file to the disk."""
    with closing(Database(url)) as database:
        pruned = prune(database, keep_versions=keep_versions, keep_days=keep_days)
        database.compact()
    return pruned
