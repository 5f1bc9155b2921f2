"""The tables of 0.3.0, which `boxcal.app.registry.tables` creates. Steps 0001 to 0011 were never released."""

revision = "0012"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Do nothing: no database has an older revision."""
