"""The reliability diagram as a PNG beside the SVG; calibrators recorded before have none."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("calibrators", sa.Column("reliability_png", sa.LargeBinary))
