"""How often a fit was started: a fit is changed only by the owner of its last attempt."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("fits", sa.Column("attempt", sa.Integer, nullable=False, server_default="0"))
