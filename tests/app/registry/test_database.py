"""The database is made, upgraded, guarded and refused as it should be."""

import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine
from sqlalchemy.exc import IntegrityError

from boxcal.app.http.problems import RegistryUnusable
from boxcal.app.registry.database import CONNECTIONS, NEXT, Database
from boxcal.app.registry.migrations import HEAD
from boxcal.app.registry.tables import metadata
from tests.app.raising import raises_problem


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'deep' / 'boxcal.db'}"


def opened(url: str) -> Database:
    database = Database(url)
    database.open()
    return database


def test_the_migrations_make_exactly_the_tables_that_the_code_uses(url: str) -> None:
    database = Database(url)
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
    database.close()


def test_head_names_the_newest_step() -> None:
    config = Config()
    config.set_main_option("script_location", "boxcal.app.registry:migrations")
    assert ScriptDirectory.from_config(config).get_current_head() == HEAD


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


def test_a_new_file_gets_the_tables_of_the_migrations(url: str, tmp_path: Path) -> None:
    migrated = tmp_path / "migrated.db"
    engine = create_engine(f"sqlite:///{migrated}")
    with engine.begin() as connection:
        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", "boxcal.app.registry:migrations")
        command.upgrade(config, "head")
    engine.dispose()
    opened(url).close()
    assert whole(tmp_path / "deep" / "boxcal.db") == whole(migrated)


def whole(path: Path) -> list[str]:
    """The tables of a file in their order, and their rows; white space is one space."""
    with closing(sqlite3.connect(path)) as connection:
        return [" ".join(statement.split()) for statement in connection.iterdump()]


def test_a_new_file_and_one_that_is_up_to_date_open_without_alembic(url: str) -> None:
    program = (
        "import sys; from boxcal.app.registry.database import Database; "
        f"Database({url!r}).open(); sys.exit('alembic' in sys.modules)"
    )
    for _ in range(2):
        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_tables_of_the_next_release_are_accepted(url: str) -> None:
    database = opened(url)
    with database.write() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = ?", (NEXT,))
    database.close()
    opened(url).close()


@pytest.mark.parametrize("table", ["calibrators", "activations"])
@pytest.mark.parametrize("change", ["DELETE FROM {}", "UPDATE {} SET created_at = '2000-01-01'"])
def test_the_database_itself_refuses_to_change_the_record(url: str, table: str, change: str) -> None:
    database = Database(url)
    with database.write() as connection:
        connection.exec_driver_sql(
            "INSERT INTO backbones VALUES (1, 'digits', 'ab', 2, '[]', 'cd', '2026-01-01 00:00:00', '')"
        )
        connection.exec_driver_sql(
            "INSERT INTO activations VALUES (1, 1, 0, 'request', NULL, '2026-01-01 00:00:00')"
        )
    with pytest.raises(IntegrityError, match=f"{table} is append-only"), database.write() as connection:
        connection.exec_driver_sql(change.format(table))
    database.close()


def test_a_database_of_the_first_release_is_brought_up_to_date_with_what_it_holds(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'boxcal.db'}"
    engine = create_engine(url)
    with engine.begin() as connection:
        config = Config(attributes={"connection": connection})
        config.set_main_option("script_location", "boxcal.app.registry:migrations")
        command.upgrade(config, "0001")
        connection.exec_driver_sql(
            "INSERT INTO calibrators (version, method, created_at) VALUES (1, 'ts', '2026-01-01 00:00:00')"
        )
    engine.dispose()
    database = Database(url)
    with database.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        rows = connection.exec_driver_sql("SELECT version, method FROM calibrators").all()
        assert rows == [(0, "uncalibrated"), (1, "ts")]
    database.close()


def test_a_newer_database_is_refused_by_name(url: str, tmp_path: Path) -> None:
    opened(url).close()
    with sqlite3.connect(tmp_path / "deep" / "boxcal.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    with raises_problem(RegistryUnusable, match="revision '9999', written by a newer release"):
        Database(url).open()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("not a url", "BOXCAL_DATABASE_URL is not a database URL"),
        ("sqlite:////proc/nowhere/boxcal.db", "cannot be opened"),
        ("nonesuch://host/name", "cannot be opened"),
    ],
)
def test_an_unusable_url_is_refused_in_words(url: str, message: str) -> None:
    with raises_problem(RegistryUnusable, match=message):
        Database(url)


def test_a_password_is_not_shown() -> None:
    with raises_problem(RegistryUnusable) as caught:
        Database("nonesuch://user:secret@host/name")
    assert "secret" not in caught.value.detail


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "boxcal.db").write_bytes(b"something else entirely" * 100)
    with raises_problem(RegistryUnusable, match="file is not a database"):
        Database(f"sqlite:///{tmp_path / 'boxcal.db'}").open()
