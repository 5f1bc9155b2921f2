"""Replicas that share a registry on PostgreSQL."""

from collections.abc import Iterator
from threading import Thread

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from boxcal.app.cli import main
from boxcal.app.http.problems import RegistryUnusable
from boxcal.app.registry.database import Database
from boxcal.app.registry.store import Registry
from boxcal.app.registry.tables import HEAD, metadata
from tests.app.fitting.validation_data import DIGITS
from tests.app.raising import raises_problem
from tests.app.registry.postgresql import PostgreSQL


@pytest.fixture(scope="module")
def url(postgresql: PostgreSQL) -> str:
    return postgresql.new_database()


@pytest.fixture(scope="module")
def replicas(url: str) -> Iterator[list[Registry]]:
    """Three that start at the same moment on an empty database."""
    opened = [Registry(url, DIGITS, owner=f"r{number}") for number in range(3)]
    starting = [Thread(target=registry.list) for registry in opened]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join()
    yield opened
    for registry in opened:
        registry.close()


def test_replicas_that_start_together_find_one_database(replicas: list[Registry], url: str) -> None:
    assert len(replicas) == 3
    assert [[record.version for record in registry.list()] for registry in replicas] == [[0]] * 3
    database = Database(url)
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    database.close()


def test_a_start_does_not_migrate_where_that_is_off(
    postgresql: PostgreSQL, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    url = postgresql.new_database()
    registry = Registry(url, DIGITS, owner="me", migrate=False)
    with raises_problem(RegistryUnusable, match=r"BOXCAL_MIGRATE is off. Run `boxcal migrate` first"):
        registry.list()
    monkeypatch.setenv("BOXCAL_DATABASE_URL", url)
    monkeypatch.setattr("sys.argv", ["boxcal", "migrate"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert f"revision {HEAD}" in capsys.readouterr().out
    assert [record.version for record in registry.list()] == [0]
    registry.close()
