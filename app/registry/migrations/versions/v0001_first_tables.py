"""The first tables: backbones, calibrators, activations and fits; two of them append-only."""

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")
MOMENT = sa.DateTime(timezone=True)
APPEND_ONLY = ("calibrators", "activations")


def upgrade() -> None:
    """Create the tables, version 0, and the triggers."""
    op.create_table(
        "backbones",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("name", sa.String(1024), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("num_classes", sa.Integer, nullable=False),
        sa.Column("labels", DOCUMENT, nullable=False),
        sa.Column("labels_sha256", sa.String(64), nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_backbones"),
        sa.UniqueConstraint(
            "name", "fingerprint", "labels_sha256", name="uq_backbones_name_fingerprint_labels_sha256"
        ),
    )
    calibrators = op.create_table(
        "calibrators",
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("backbone_id", sa.Integer),
        sa.Column("method", sa.String(128), nullable=False),
        sa.Column("spec", DOCUMENT),
        sa.Column("artifact", sa.LargeBinary),
        sa.Column("sha256", sa.String(64)),
        sa.Column("report", DOCUMENT),
        sa.Column("reliability_svg", sa.LargeBinary),
        sa.Column("samples", sa.Integer),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("version", name="pk_calibrators"),
        sa.ForeignKeyConstraint(["backbone_id"], ["backbones.id"], name="fk_calibrators_backbone_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_calibrators_backbone_id", "calibrators", ["backbone_id"])
    op.create_table(
        "activations",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("backbone_id", sa.Integer, nullable=False),
        sa.Column("version", sa.Integer, nullable=False),
        sa.Column("reason", sa.String(32), nullable=False),
        sa.Column("previous", sa.Integer),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_activations"),
        sa.ForeignKeyConstraint(["backbone_id"], ["backbones.id"], name="fk_activations_backbone_id"),
        sa.ForeignKeyConstraint(["version"], ["calibrators.version"], name="fk_activations_version"),
        sa.ForeignKeyConstraint(["previous"], ["activations.id"], name="fk_activations_previous"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_activations_backbone_id_id", "activations", ["backbone_id", "id"])
    op.create_table(
        "fits",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("backbone_id", sa.Integer, nullable=False),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("method", sa.String(128), nullable=False),
        sa.Column("activate", sa.String(16), nullable=False),
        sa.Column("samples", sa.Integer, nullable=False),
        sa.Column("progress", sa.Float, nullable=False),
        sa.Column("stage", sa.String(256), nullable=False),
        sa.Column("calibrator", sa.Integer),
        sa.Column("activated", sa.Boolean),
        sa.Column("decision", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("started_at", MOMENT),
        sa.Column("finished_at", MOMENT),
        sa.Column("seen_at", MOMENT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_fits"),
        sa.ForeignKeyConstraint(["backbone_id"], ["backbones.id"], name="fk_fits_backbone_id"),
        sa.ForeignKeyConstraint(["calibrator"], ["calibrators.version"], name="fk_fits_calibrator"),
    )
    op.create_index("ix_fits_backbone_id_created_at", "fits", ["backbone_id", "created_at"])
    op.create_index("ix_fits_state", "fits", ["state"])
    op.bulk_insert(
        calibrators,
        [{"version": 0, "method": "uncalibrated", "created_at": datetime(1970, 1, 1, tzinfo=UTC)}],
    )
    guard(postgresql=op.get_bind().dialect.name == "postgresql")


def guard(*, postgresql: bool) -> None:
    """Make the database refuse every change and removal of a row of the append-only tables."""
    if postgresql:
        op.execute(
            "CREATE FUNCTION boxcal_append_only() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
        )
    for table in APPEND_ONLY:
        if postgresql:
            op.execute(
                f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
                "FOR EACH STATEMENT EXECUTE FUNCTION boxcal_append_only()"
            )
            continue
        for action in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_no_{action.lower()} BEFORE {action} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
