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


def downgrade() -> None:
    """Refuse: the record is not taken back."""
    raise NotImplementedError("Revision 0002 cannot be undone; restore a copy of the database instead.")
