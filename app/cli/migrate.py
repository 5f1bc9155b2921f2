"""`boxcal migrate`: applies missing migrations to the registry of the settings."""

from pathlib import Path

from boxcal.app.cli.output import screen
from boxcal.app.cli.settings import read_settings
from boxcal.app.registry.maintenance import migrate


def run(config: Path | None) -> None:
    """Migrate, and print the revision.

    Raises
    ------
    BoxcalError
        The registry does not answer, or cannot be used.
    """
    screen.print(f"The registry has the tables of revision {migrate(read_settings(config).registry_url)}.")
