"""The database is created, upgraded, guarded and refused as it should be."""

import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory

from boxcal.app.http.problems import RegistryUnusable
from boxcal.app.registry import migrations
from boxcal.app.registry.database import CONNECTIONS, NEXT, Database
from boxcal.app.registry.migrations import HEAD
from tests.app.raising import raises_problem


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'deep' / 'boxcal.db'}"


def opened(url: str) -> Database:
    database = Database(url)
    database.open()
    return database


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


NEW_STEP = """
import sqlalchemy as sa
from alembic import op
revision, down_revision = "0013", "0012"
def upgrade():
    op.add_column("fits", sa.Column("added", sa.String(8), nullable=False, server_default="one"))
"""


def test_a_new_step_is_applied_and_keeps_what_the_database_contains(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(url).close()
    scripts = tmp_path / "migrations"
    shutil.copytree(Path(migrations.__file__).parent, scripts)
    (scripts / "versions" / "v0013_new.py").write_text(NEW_STEP)
    monkeypatch.setattr("boxcal.app.registry.database.SCRIPTS", str(scripts))
    monkeypatch.setattr("boxcal.app.registry.database.HEAD", "0013")
    database = opened(url)
    with database.read() as connection:
        assert connection.exec_driver_sql("SELECT count(added) FROM fits").scalar() == 0
        assert connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar() == "0013"
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
