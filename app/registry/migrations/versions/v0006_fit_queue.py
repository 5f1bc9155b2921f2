"""Fits that any replica may cancel, and that another may continue."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns."""
    op.add_column(
        "fits", sa.Column("cancel_requested", sa.Boolean, nullable=False, server_default=sa.false())
    )
    op.add_column("fits", sa.Column("shared", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("fits", sa.Column("budget_seconds", sa.Float))
