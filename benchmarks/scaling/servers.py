"""A private PostgreSQL server for a measurement."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.app.registry.postgresql import PostgreSQL


@contextmanager
def postgresql(*options: str) -> Iterator[tuple[PostgreSQL, Path]]:
    """Run a server for as long as the block lasts; gives it and a folder for everything else."""
    with tempfile.TemporaryDirectory(prefix="boxcal-scaling-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (cluster := folder / "postgresql").mkdir()
        server = PostgreSQL(cluster)
        with (cluster / "data" / "postgresql.conf").open("a") as configuration:
            configuration.writelines(f"{option}\n" for option in options)
        server.start()
        try:
            yield server, folder
        finally:
            server.stop()


def require(condition: bool, found: object) -> None:
    """Stop the measurement if something did not do what it should."""
    if not condition:
        raise RuntimeError(f"unexpected: {found}")
