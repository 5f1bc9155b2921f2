"""What every replica asks every two seconds is a function on PostgreSQL, whose plans each session keeps."""

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

LOOK = """
CREATE OR REPLACE FUNCTION boxcal_look(backbone integer, process text, silence interval)
RETURNS TABLE (
    activation integer, is_abandoned boolean, is_cancelled boolean,
    keys_created bigint, keys_revoked bigint, log_seq bigint, monitor_revision bigint
) LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN QUERY SELECT
        (SELECT max(a.id) FROM activations a WHERE a.backbone_id = backbone),
        EXISTS (
            SELECT 1 FROM fits f
            WHERE f.backbone_id = backbone AND f.state IN ('queued', 'running') AND f.owner <> process
            AND (f.owner = '' OR f.seen_at < clock_timestamp() - silence)
        ),
        EXISTS (
            SELECT 1 FROM fits f
            WHERE f.backbone_id = backbone AND f.state IN ('queued', 'running') AND f.owner = process
            AND f.cancel_requested
        ),
        (SELECT count(*) FROM api_keys),
        (SELECT count(k.revoked_at) FROM api_keys k),
        (SELECT l.seq FROM feedback_logs l WHERE l.backbone_id = backbone),
        (SELECT m.revision FROM monitors m WHERE m.backbone_id = backbone);
END
$$
"""


def upgrade() -> None:
    """Create the function."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute(LOOK)
