"""The database is created, upgraded, guarded and refused as it should be."""

import resource
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from sqlalchemy import Connection

from boxcal.app.http.problems import RegistryFull, RegistryUnavailable, RegistryUnusable
from boxcal.app.registry import database as registry_database
from boxcal.app.registry.database import CONNECTIONS, FIRST, NEXT, STEPS, Database
from boxcal.app.registry.tables import HEAD
from tests.app.raising import raises_problem


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'deep' / 'boxcal.db'}"


def opened(url: str) -> Database:
    database = Database(url)
    database.open()
    return database


def test_head_is_the_revision_of_the_newest_step() -> None:
    assert [FIRST, *STEPS][-1] == HEAD


def test_a_read_within_a_transaction_needs_no_other_connection(url: str) -> None:
    """The other may wait for this transaction, as an activation waits for the monitor."""
    database = opened(url)

    def write() -> None:
        with database.write() as connection:
            connection.exec_driver_sql("SELECT 1")

    waiting = [threading.Thread(target=write) for _ in range(CONNECTIONS)]
    with database.write() as outer:
        for thread in waiting:
            thread.start()
        time.sleep(0.3)  # until they have taken the other connection
        with database.read() as inner:
            assert inner is outer
    for thread in waiting:
        thread.join()
    with database.read() as later:
        assert later is not outer
    database.close()


def test_the_tables_of_the_next_release_are_accepted(url: str) -> None:
    database = opened(url)
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = ?", (NEXT,))
    database.close()
    opened(url).close()


def test_new_steps_are_applied_and_keep_what_the_database_contains(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(url).close()

    def add(name: str) -> Callable[[Connection], object]:
        statement = f"ALTER TABLE fits ADD COLUMN {name} VARCHAR(8) NOT NULL DEFAULT 'one'"
        return lambda connection: connection.exec_driver_sql(statement)

    monkeypatch.setattr(registry_database, "STEPS", {"0013": add("added"), "0014": add("later")})
    monkeypatch.setattr(registry_database, "HEAD", "0014")
    database = opened(url)
    with database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(added || later) FROM fits").scalar() == 0
        assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar() == "0014"
        rows = connection.exec_driver_sql("SELECT version, method FROM calibrators").all()
        assert rows == [(0, "uncalibrated")]
    database.close()


@pytest.mark.parametrize("revision", ["9999", "0011"])
def test_a_newer_or_unreleased_database_is_refused(url: str, tmp_path: Path, revision: str) -> None:
    opened(url).close()
    with sqlite3.connect(tmp_path / "deep" / "boxcal.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", [revision])
    connection.close()
    with raises_problem(RegistryUnusable, match=f"revision '{revision}'; this release accepts '0012' and"):
        Database(url).open()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("not a url", "BOXCAL_DATABASE_URL is not a database URL"),
        ("postgresql://user@host:port/name", "BOXCAL_DATABASE_URL is not a database URL: invalid literal"),
        ("sqlite://", "BOXCAL_DATABASE_URL names no file: write sqlite:////PATH/boxcal.db"),
        ("sqlite:////proc/nowhere/boxcal.db", "cannot be opened"),
        ("nonesuch://host/name", "cannot be opened"),
    ],
)
def test_an_unusable_url_is_refused_in_words(url: str, message: str) -> None:
    with raises_problem(RegistryUnusable, match=message):
        Database(url)


def test_a_full_disk_keeps_a_file_from_shrinking_and_says_so(tmp_path: Path) -> None:
    database = opened(f"sqlite:///{tmp_path / 'boxcal.db'}")
    with database.write() as connection:
        connection.exec_driver_sql("CREATE TABLE large AS SELECT zeroblob(1000000) AS bytes")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        with raises_problem(RegistryFull, match="Deleted, but the file is as large as before: d"):
            database.compact()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        database.close()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_nothing_is_written_to_a_file_that_was_removed_or_replaced(tmp_path: Path, is_replaced: bool) -> None:
    """The removed file stays open: transactions on it would succeed, and be lost at the next start."""
    path, kept = tmp_path / "boxcal.db", tmp_path / "kept.db"
    database = opened(f"sqlite:///{path}")
    if is_replaced:
        opened(f"sqlite:///{kept}").close()
        path.rename(tmp_path / "gone.db")
        kept.rename(path)
    else:
        path.rename(kept)
    for work in (database.write, database.read, database.read_one):
        lost = pytest.raises(RegistryUnavailable, match="removed or replaced while it was in use; restart")
        with lost, work():
            pytest.fail("entered")
    (tmp_path / ("gone.db" if is_replaced else "kept.db")).rename(path)
    with database.write() as connection:
        assert connection.exec_driver_sql("SELECT version FROM calibrators").all() == [(0,)]
    database.close()


def test_a_password_is_not_shown() -> None:
    with raises_problem(RegistryUnusable) as caught:
        Database("nonesuch://user:secret@host/name")
    assert "secret" not in caught.value.detail


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "boxcal.db").write_bytes(b"something else entirely" * 100)
    with raises_problem(RegistryUnusable, match="file is not a database"):
        Database(f"sqlite:///{tmp_path / 'boxcal.db'}").open()
