"""Creates the tables of a new database, and what SQLAlchemy does not: triggers, a function, version 0.

A migration that changes the tables changes `tables.py` too, and a trigger or a function here.
"""

from __future__ import annotations

from datetime import UTC, datetime

from sqlalchemy import Connection, insert, text

from boxcal.app.registry.migrations import HEAD
from boxcal.app.registry.tables import calibrators, metadata

KEPT = ("version", "backbone_id", "method", "sha256", "samples", "created_at")
PRUNED_PARTS = ("spec", "artifact", "report", "reliability_svg", "reliability_png")
"""Large columns of a calibrator that become NULL, once, when it is pruned."""
APPEND_ONLY = ("activations", "audit", "calibrators")
POSTGRESQL_REFUSES = dict.fromkeys(APPEND_ONLY, "UPDATE OR DELETE") | {"calibrators": "DELETE"}

SNAPSHOT = """
CREATE FUNCTION boxcal_snapshot(backbone integer, process text, overdue interval)
RETURNS TABLE (
    activation integer, is_abandoned boolean, is_cancelled boolean,
    keys_created bigint, keys_revoked bigint, log_seq bigint, monitor_revision bigint
) LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN QUERY SELECT
        (SELECT max(a.id) FROM activations a WHERE a.backbone_id = backbone),
        EXISTS (
            SELECT 1 FROM fits f
            WHERE f.backbone_id = backbone AND f.state IN ('queued', 'running') AND f.owner <> process
            AND (f.owner = '' OR f.seen_at < clock_timestamp() - overdue)
        ),
        EXISTS (
            SELECT 1 FROM fits f
            WHERE f.backbone_id = backbone AND f.state IN ('queued', 'running') AND f.owner = process
            AND f.cancel_requested
        ),
        (SELECT count(*) FROM api_keys),
        (SELECT count(k.revoked_at) FROM api_keys k),
        (SELECT l.seq FROM feedback_logs l WHERE l.backbone_id = backbone),
        (SELECT m.revision FROM monitors m WHERE m.backbone_id = backbone);
END
$$
"""
"""A function of PostgreSQL: planning its subqueries takes ten times as long as answering them."""


def create_schema(connection: Connection) -> None:
    """Create everything in an empty database, and record that it has the newest revision."""
    metadata.create_all(connection, checkfirst=False)
    connection.execute(
        insert(calibrators).values(
            version=0, method="uncalibrated", created_at=datetime(1970, 1, 1, tzinfo=UTC)
        )
    )
    postgresql = connection.dialect.name == "postgresql"
    for statement in _postgresql() if postgresql else _sqlite():
        connection.exec_driver_sql(statement)
    # As Alembic would have created and written it.
    connection.exec_driver_sql(
        "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
        "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
    )
    connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": HEAD})


def _pruning(same: str) -> str:
    """Say in SQL that an update prunes a calibrator, the only change of its row."""
    return " AND ".join(
        [
            "OLD.pruned_at IS NULL AND NEW.pruned_at IS NOT NULL",
            *(f"NEW.{column} {same} OLD.{column}" for column in KEPT),
            *(f"NEW.{column} IS NULL" for column in PRUNED_PARTS),
        ]
    )


def _sqlite() -> list[str]:
    """Give triggers that refuse every change and removal of a row of the append-only tables."""
    return [
        f"CREATE TRIGGER {table}_no_{action.lower()} BEFORE {action} ON {table} "
        + (f"WHEN NOT ({_pruning('IS')}) " if (table, action) == ("calibrators", "UPDATE") else "")
        + f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
        for table in APPEND_ONLY
        for action in ("UPDATE", "DELETE")
    ]


def _postgresql() -> list[str]:
    """Give the same triggers, and the function of the snapshots."""
    refuse = "EXECUTE FUNCTION boxcal_append_only()"
    triggers = [
        f"CREATE TRIGGER {table}_append_only BEFORE {actions} OR TRUNCATE ON {table} "
        f"FOR EACH STATEMENT {refuse}"
        for table, actions in POSTGRESQL_REFUSES.items()
    ]
    return [
        "CREATE FUNCTION boxcal_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION '%% is append-only', TG_TABLE_NAME; END $$",
        *triggers,
        "CREATE TRIGGER calibrators_no_update BEFORE UPDATE ON calibrators FOR EACH ROW "
        f"WHEN (NOT ({_pruning('IS NOT DISTINCT FROM')})) {refuse}",
        SNAPSHOT,
    ]
