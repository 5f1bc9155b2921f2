"""`boxcal serve`: the service's settings from the command line and the environment, and its start."""

from pathlib import Path

from boxcal.app.cli.settings import read_settings
from boxcal.app.server import serve


def run(*, host: str | None, port: int | None, model: str | None, data_dir: Path | None) -> None:
    """Serve until stopped; options left out come from the environment."""
    serve(read_settings(host=host, port=port, model=model, data_dir=data_dir))
