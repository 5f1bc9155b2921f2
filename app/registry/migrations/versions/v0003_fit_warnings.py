"""What is probably wrong with the data of a fit; fits recorded before have no warnings."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects.postgresql import JSONB

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("fits", sa.Column("warnings", sa.JSON().with_variant(JSONB(), "postgresql")))


def downgrade() -> None:
    """Refuse: the record is not taken back."""
    raise NotImplementedError("Revision 0003 cannot be undone; restore a copy of the database instead.")
