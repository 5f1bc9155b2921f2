"""One PostgreSQL server for the tests of one process, and an empty database for each test that asks."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.registry.postgresql import PostgreSQL, is_installed


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgreSQL]:
    """A running server; a test that stops or pauses it starts or resumes it."""
    if not is_installed():
        pytest.skip("PostgreSQL is not installed")
    # Not under pytest's folder, which the user `postgres` may not enter.
    with tempfile.TemporaryDirectory(prefix="boxcal-postgresql-") as folder:
        server = PostgreSQL(Path(folder))
        server.start()
        yield server
        server.stop()


@pytest.fixture
def url(postgresql: PostgreSQL) -> str:
    return postgresql.new_database()
