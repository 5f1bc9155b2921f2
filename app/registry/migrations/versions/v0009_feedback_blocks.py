"""Predictions that wait for labels are stored many in one row; `feedback` keeps only those with a label."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table; what waits for labels in `feedback`, which no release has written, is deleted."""
    op.create_table(
        "feedback_blocks",
        sa.Column("backbone_id", sa.Integer, nullable=False),
        sa.Column("id", sa.String(24), nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("row_count", sa.Integer, nullable=False),
        sa.Column("versions", sa.LargeBinary, nullable=False),
        sa.Column("moments", sa.LargeBinary, nullable=False),
        sa.Column("logits", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("backbone_id", "id", name="pk_feedback_blocks"),
        sa.ForeignKeyConstraint(["backbone_id"], ["backbones.id"], name="fk_feedback_blocks_backbone_id"),
    )
    op.create_index("ix_feedback_blocks_backbone_id_seq", "feedback_blocks", ["backbone_id", "seq"])
    op.execute("DELETE FROM feedback WHERE label IS NULL")
    op.execute(
        "UPDATE feedback_logs SET row_count = (SELECT count(*) FROM feedback WHERE version IS NULL "
        "AND feedback.backbone_id = feedback_logs.backbone_id)"
    )
