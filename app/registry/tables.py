"""The tables of the registry, with types that SQLite and PostgreSQL share.

`create_schema` creates them in a new database, with what SQLAlchemy does not create: triggers, a function and
version 0. `calibrators`, `activations` and `audit` are append-only: triggers refuse any other change.

A step of `STEPS` in `database.py` makes the same change to an older database.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Connection,
    DateTime,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.engine import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeDecorator, TypeEngine

from boxcal.app.http.problems import CalibratorNotFound, CalibratorPruned
from boxcal.app.registry.records import BackboneIdentity, CalibratorRecord

HEAD = "0012"
"""The revision of these tables."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class JsonDocument(TypeDecorator[Any]):
    """JSON; with PostgreSQL its binary form, whose dialect a service on SQLite does not import."""

    impl = JSON
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        """Return the type of the database."""
        if dialect.name != "postgresql":
            return self.impl_instance
        from sqlalchemy.dialects.postgresql import JSONB  # noqa: PLC0415

        return dialect.type_descriptor(JSONB())


class UtcDateTime(TypeDecorator[datetime]):
    """A moment in UTC; SQLite stores no time zone, so it is added to what is read."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to UTC; a moment without time zone is refused."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"A moment needs a time zone, got {value!r}.")
        return value.astimezone(UTC)

    def process_result_value(self, value: Any, dialect: Dialect) -> datetime | None:
        """Add the time zone."""
        if value is None:
            return None
        moment: datetime = value
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


class utc_now(FunctionElement[Any]):  # noqa: N801 - an SQL function
    """The time of the database: the clocks of replicas may differ."""

    type: Any = UtcDateTime()
    inherit_cache = True
    sqlite, postgresql = "utc_now()", "clock_timestamp()"  # SQLite: defined for each connection


class seconds_now(utc_now):  # noqa: N801
    """The same, in seconds since 1970."""

    type = Float()
    inherit_cache = True
    sqlite, postgresql = "seconds_now()", "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


@compiles(utc_now)
def _sqlite_now(element: utc_now, _compiler: SQLCompiler, **_options: Any) -> str:
    return element.sqlite


@compiles(utc_now, "postgresql")
def _postgresql_now(element: utc_now, _compiler: SQLCompiler, **_options: Any) -> str:
    return element.postgresql


# `model` is empty except for models with the same backbone in one process: all but the first have a name.
# `labels_sha256` depends on it, so that the constraint holds for every name.
backbones = Table(
    "backbones",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String(1024), nullable=False),
    Column("fingerprint", String(64), nullable=False),
    Column("num_classes", Integer, nullable=False),
    Column("labels", JsonDocument, nullable=False),
    Column("labels_sha256", String(64), nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("model", String(64), nullable=False, server_default=""),
    UniqueConstraint("name", "fingerprint", "labels_sha256"),
)

# Version 0, `uncalibrated`, is a row like the others, but belongs to no backbone and needs no artifact.
calibrators = Table(
    "calibrators",
    metadata,
    Column("version", Integer, primary_key=True),
    Column("backbone_id", ForeignKey("backbones.id"), index=True),
    Column("method", String(128), nullable=False),
    Column("spec", JsonDocument),
    Column("artifact", LargeBinary),
    Column("sha256", String(64)),
    Column("report", JsonDocument),
    Column("reliability_svg", LargeBinary),
    Column("samples", Integer),
    Column("created_at", UtcDateTime, nullable=False),
    Column("reliability_png", LargeBinary),
    Column("pruned_at", UtcDateTime),
    sqlite_autoincrement=True,
)

# `previous` is the activation that a rollback of this one returns to: rolling back twice goes back twice.
activations = Table(
    "activations",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("backbone_id", ForeignKey("backbones.id"), nullable=False),
    Column("version", ForeignKey("calibrators.version"), nullable=False),
    Column("reason", String(32), nullable=False),
    Column("previous", ForeignKey("activations.id")),
    Column("created_at", UtcDateTime, nullable=False),
    Index("ix_activations_backbone_id_id", "backbone_id", "id"),
    sqlite_autoincrement=True,
)

fits = Table(
    "fits",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("backbone_id", ForeignKey("backbones.id"), nullable=False),
    Column("owner", String(64), nullable=False),
    Column("attempt", Integer, nullable=False, server_default="0"),
    Column("state", String(16), nullable=False),
    Column("method", String(128), nullable=False),
    Column("activate", String(16), nullable=False),
    Column("samples", Integer, nullable=False),
    Column("progress", Float, nullable=False),
    Column("stage", String(256), nullable=False),
    Column("calibrator", ForeignKey("calibrators.version")),
    Column("activated", Boolean),
    Column("decision", Text),
    Column("warnings", JsonDocument),
    Column("error", Text),
    Column("created_at", UtcDateTime, nullable=False),
    Column("started_at", UtcDateTime),
    Column("finished_at", UtcDateTime),
    Column("seen_at", UtcDateTime, nullable=False),
    Column("cancel_requested", Boolean, nullable=False, server_default=false()),
    Column("shared", Boolean, nullable=False, server_default=false()),
    Column("budget_seconds", Float),
    Index("ix_fits_backbone_id_created_at", "backbone_id", "created_at"),
    Index("ix_fits_state", "state"),
)

# One row for each backbone: the last number given in its log of predictions and labels, and how many
# predictions are kept. Writers lock it, so that numbers become visible in their order.
feedback_logs = Table(
    "feedback_logs",
    metadata,
    Column("backbone_id", ForeignKey("backbones.id"), primary_key=True, autoincrement=False),
    Column("seq", BigInteger, nullable=False),
    Column("row_count", BigInteger, nullable=False),
)

# Predictions whose labels may arrive, many in one row, at consecutive places of the log; `seq` is the last of
# them. `versions` (int32), `moments` (float64, seconds since 1970) and `logits` (`stored_logits`) are arrays.
feedback_blocks = Table(
    "feedback_blocks",
    metadata,
    Column("backbone_id", ForeignKey("backbones.id"), primary_key=True, autoincrement=False),
    Column("id", String(24), primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("row_count", Integer, nullable=False),
    Column("versions", LargeBinary, nullable=False),
    Column("moments", LargeBinary, nullable=False),
    Column("logits", LargeBinary, nullable=False),
    Index("ix_feedback_blocks_backbone_id_seq", "backbone_id", "seq"),
)

# Predictions with a label, copied from their block; those without a version came with their label. `seq` is
# the place of the prediction in the log, `label_seq` that of its first label.
feedback = Table(
    "feedback",
    metadata,
    Column("backbone_id", ForeignKey("backbones.id"), primary_key=True, autoincrement=False),
    Column("id", String(64), primary_key=True),
    Column("seq", BigInteger, nullable=False),
    Column("version", Integer),
    Column("predicted_at", Float, nullable=False),
    Column("logits", LargeBinary, nullable=False),
    Column("label_seq", BigInteger),
    Column("label", Integer),
    Column("latest_label", Integer),
    Column("labelled_at", Float),
    Column("propensity", Float),
    Column("source", String(64)),
    Index("ix_feedback_backbone_id_seq", "backbone_id", "seq"),
    Index("ix_feedback_backbone_id_label_seq", "backbone_id", "label_seq"),
)

monitors = Table(
    "monitors",
    metadata,
    Column("backbone_id", ForeignKey("backbones.id"), primary_key=True, autoincrement=False),
    Column("seq", BigInteger, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("activation", Integer, nullable=False),
    Column("state", LargeBinary, nullable=False),
    Column("document", JsonDocument, nullable=False),
    Column("updated_at", UtcDateTime, nullable=False),
    Column("refit_owner", String(64)),
    Column("refit_seen_at", Float),
)

monitor_events = Table(
    "monitor_events",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("backbone_id", ForeignKey("backbones.id"), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("document", JsonDocument, nullable=False),
    Column("created_at", UtcDateTime, nullable=False),
    Column("claimed_at", Float),
    Column("delivered_at", Float),
    Index("ix_monitor_events_backbone_id_id", "backbone_id", "id"),
    sqlite_autoincrement=True,
)

# Revoked keys stay: once there is a key, requests without one are refused.
api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(16), primary_key=True),
    Column("name", String(128), nullable=False),
    Column("salt", LargeBinary, nullable=False),
    Column("digest", LargeBinary, nullable=False),
    Column("scopes", JsonDocument, nullable=False),
    Column("per_minute", Integer),
    Column("concurrency", Integer),
    Column("created_at", UtcDateTime, nullable=False),
    Column("expires_at", UtcDateTime),
    Column("revoked_at", UtcDateTime),
    Column("last_used_at", UtcDateTime),
)

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("at", UtcDateTime, nullable=False),
    Column("action", String(32), nullable=False),
    Column("subject", String(256), nullable=False),
    Column("actor", String(128), nullable=False),
    Column("key_id", String(16)),
    Column("address", String(64), nullable=False),
    Column("details", JsonDocument, nullable=False),
    sqlite_autoincrement=True,
)


def select_records() -> Any:
    """Select what a `CalibratorRecord` has."""
    columns = ("version", "method", "spec", "sha256", "samples", "created_at", "pruned_at")
    size = func.length(calibrators.c.artifact).label("size")
    owner = [backbones.c.name, backbones.c.fingerprint, backbones.c.labels, backbones.c.model]
    return select(*(calibrators.c[name] for name in columns), size, *owner).select_from(
        calibrators.outerjoin(backbones)
    )


def refuse_pruned(record: CalibratorRecord) -> None:
    """Raise CalibratorPruned if the large parts of a calibrator were deleted."""
    if record.pruned_at is not None:
        raise CalibratorPruned(f"Calibrator {record.version} was pruned at {record.pruned_at:%F %T} UTC.")


def record_of(row: Any) -> CalibratorRecord:
    """Read a row of `select_records`."""
    values = dict(row._mapping)
    name, fingerprint, labels, model = (
        values.pop(column) for column in ("name", "fingerprint", "labels", "model")
    )
    identity = None if fingerprint is None else BackboneIdentity(name, fingerprint, tuple(labels), model)
    return CalibratorRecord(backbone=identity, **values)


def find_record(connection: Connection, version: int) -> CalibratorRecord:
    row = connection.execute(select_records().where(calibrators.c.version == version)).one_or_none()
    if row is None:
        newest = connection.execute(select(func.max(calibrators.c.version))).scalar_one()
        raise CalibratorNotFound(f"There is no calibrator {version}; the newest is {newest}.")
    return record_of(row)


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
