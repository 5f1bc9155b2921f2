"""A private PostgreSQL server for a measurement, and the processor time of a process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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


def threads_seconds(pid: int) -> float:
    """Processor time of all threads of a process, as precise as the scheduler counts it."""
    total = 0
    with suppress(OSError):  # the process has ended
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has ended
                total += int((thread / "schedstat").read_text().split()[0])
    return total / 1e9
