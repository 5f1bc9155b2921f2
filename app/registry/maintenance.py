"""What the command line does with a registry while the service may be running."""

from boxcal.app.registry.database import Database
from boxcal.app.registry.migrations import HEAD
from boxcal.app.registry.retention import prune


def migrate(url: str) -> str:
    """Apply missing migrations to the registry at a URL, and return its revision."""
    database = Database(url)
    try:
        database.open()
        return HEAD
    finally:
        database.close()


def prune_and_compact(url: str, *, keep_versions: int, keep_days: float) -> list[int]:
    """Prune the registry at a URL, and return the space of a SQLite file to the disk."""
    database = Database(url)
    try:
        pruned = prune(database, keep_versions=keep_versions, keep_days=keep_days)
        database.compact()
        return pruned
    finally:
        database.close()
