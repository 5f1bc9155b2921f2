"""Calibrators may be pruned: their large parts become NULL, once; every other change is still refused."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

KEPT = ("version", "backbone_id", "method", "sha256", "samples", "created_at")
PARTS = ("spec", "artifact", "report", "reliability_svg", "reliability_png")


def upgrade() -> None:
    """Add the column, and let the triggers accept this one change."""
    op.add_column("calibrators", sa.Column("pruned_at", sa.DateTime(timezone=True)))
    postgresql = op.get_bind().dialect.name == "postgresql"
    same = "IS NOT DISTINCT FROM" if postgresql else "IS"
    pruning = " AND ".join(
        [
            "OLD.pruned_at IS NULL AND NEW.pruned_at IS NOT NULL",
            *(f"NEW.{column} {same} OLD.{column}" for column in KEPT),
            *(f"NEW.{column} IS NULL" for column in PARTS),
        ]
    )
    if not postgresql:
        op.execute("DROP TRIGGER calibrators_no_update")
        op.execute(
            f"CREATE TRIGGER calibrators_no_update BEFORE UPDATE ON calibrators WHEN NOT ({pruning}) "
            "BEGIN SELECT RAISE(ABORT, 'calibrators is append-only'); END"
        )
        return
    op.execute("DROP TRIGGER calibrators_append_only ON calibrators")
    op.execute(
        "CREATE TRIGGER calibrators_append_only BEFORE DELETE OR TRUNCATE ON calibrators "
        "FOR EACH STATEMENT EXECUTE FUNCTION boxcal_append_only()"
    )
    op.execute(
        "CREATE TRIGGER calibrators_no_update BEFORE UPDATE ON calibrators FOR EACH ROW "
        f"WHEN (NOT ({pruning})) EXECUTE FUNCTION boxcal_append_only()"
    )
