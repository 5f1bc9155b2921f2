"""Several models with the same backbone have calibrators of their own; what there is has no name."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("backbones", sa.Column("model", sa.String(64), nullable=False, server_default=""))
