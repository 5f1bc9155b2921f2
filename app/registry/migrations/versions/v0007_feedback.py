"""Feedback: predictions that wait for labels, the state of the monitor, and its events."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

DOCUMENT = sa.JSON().with_variant(JSONB(), "postgresql")
MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "feedback_logs",
        sa.Column("backbone_id", sa.Integer, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("row_count", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("backbone_id", name="pk_feedback_logs"),
        sa.ForeignKeyConstraint(["backbone_id"], ["backbones.id"], name="fk_feedback_logs_backbone_id"),
    )
    op.create_table(
        "feedback",
        sa.Column("backbone_id", sa.Integer, nullable=False),
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("version", sa.Integer),
        sa.Column("predicted_at", sa.Float, nullable=False),
        sa.Column("logits", sa.LargeBinary, nullable=False),
        sa.Column("label_seq", sa.BigInteger),
        sa.Column("label", sa.Integer),
        sa.Column("latest_label", sa.Integer),
        sa.Column("labelled_at", sa.Float),
        sa.Column("propensity", sa.Float),
        sa.Column("source", sa.String(64)),
        sa.PrimaryKeyConstraint("backbone_id", "id", name="pk_feedback"),
        sa.ForeignKeyConstraint(["backbone_id"], ["backbones.id"], name="fk_feedback_backbone_id"),
    )
    op.create_index("ix_feedback_backbone_id_seq", "feedback", ["backbone_id", "seq"])
    op.create_index("ix_feedback_backbone_id_label_seq", "feedback", ["backbone_id", "label_seq"])
    op.create_table(
        "monitors",
        sa.Column("backbone_id", sa.Integer, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("activation", sa.Integer, nullable=False),
        sa.Column("state", sa.LargeBinary, nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.Column("updated_at", MOMENT, nullable=False),
        sa.Column("refit_owner", sa.String(64)),
        sa.Column("refit_seen_at", sa.Float),
        sa.PrimaryKeyConstraint("backbone_id", name="pk_monitors"),
        sa.ForeignKeyConstraint(["backbone_id"], ["backbones.id"], name="fk_monitors_backbone_id"),
    )
    op.create_table(
        "monitor_events",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("backbone_id", sa.Integer, nullable=False),
        sa.Column("kind", sa.String(32), nullable=False),
        sa.Column("document", DOCUMENT, nullable=False),
        sa.Column("created_at", MOMENT, nullable=False),
        sa.Column("claimed_at", sa.Float),
        sa.Column("delivered_at", sa.Float),
        sa.PrimaryKeyConstraint("id", name="pk_monitor_events"),
        sa.ForeignKeyConstraint(["backbone_id"], ["backbones.id"], name="fk_monitor_events_backbone_id"),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_monitor_events_backbone_id_id", "monitor_events", ["backbone_id", "id"])
