"""`boxcal doctor`, `--version` and misspelt variables: what a user meets before the service starts."""

import socket
import sqlite3
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from boxcal.app.settings import limits
from boxcal.app.settings.service import unknown_variable
from tests.app.cli.conftest import Boxcal


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("BOXCAL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("BOXCAL_DEVICE", "cpu")
    monkeypatch.setenv("BOXCAL_PORT", "0")


def checks(boxcal: Boxcal, code: int) -> dict[str, Any]:
    ended = boxcal("doctor", "--json")
    assert ended.code == code, ended.stderr
    return {entry["check"]: (entry["ok"], entry["found"]) for entry in ended.json}


def test_doctor_finds_nothing_wrong_and_changes_nothing(boxcal: Boxcal, tmp_path: Path) -> None:
    found = checks(boxcal, 0)
    assert found["model"] == (True, "digits: 10 classes on cpu")
    assert "will be created" in found["registry"][1]
    assert "is writable" in found["disk"][1]
    assert found["port"] == (True, "127.0.0.1:0 is free")
    checked = [["ok", check] for check in ("model", "registry", "disk", "port", "sandbox")]
    assert [line.split()[:2] for line in boxcal("doctor").stdout.splitlines()] == checked
    assert not list(tmp_path.iterdir())


def test_doctor_misses_the_key_that_serve_requires(
    boxcal: Boxcal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BOXCAL_HOST", "0.0.0.0")  # noqa: S104 - nothing listens
    missing = (
        "BOXCAL_HOST is 0.0.0.0, which other machines reach, and the registry has no valid API key. Create "
        "one with `boxcal keys create NAME --scope admin`, or set BOXCAL_ALLOW_ANONYMOUS=1 to serve everyone."
    )
    assert checks(boxcal, 1)["registry"] == (False, missing)
    assert boxcal("migrate").code == 0
    assert checks(boxcal, 1)["registry"] == (False, missing)
    assert boxcal("keys", "create", "ci", "--scope", "admin").code == 0
    assert checks(boxcal, 0)["registry"][0]
    (key,) = boxcal("keys", "list", "--json").json
    assert boxcal("keys", "revoke", key["id"]).code == 0
    assert checks(boxcal, 1)["registry"] == (False, missing)
    monkeypatch.setenv("BOXCAL_ALLOW_ANONYMOUS", "1")
    assert checks(boxcal, 0)["registry"][0]


def test_doctor_names_the_model_that_cannot_be_served(
    boxcal: Boxcal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "models.toml"
    file.write_text("[a]\nmodel = 'digits'\n[b]\nmodel = 'logits:3'\nupper = 0.2")
    monkeypatch.setenv("BOXCAL_MODEL", str(file))
    ok, found = checks(boxcal, 1)["model"]
    assert not ok
    assert found.startswith("b: ")
    assert "0.6" in found


def test_doctor_reports_every_failure(
    boxcal: Boxcal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken.sqlite3").write_text("this is not a database, it is a text file")
    monkeypatch.setenv("BOXCAL_MODEL", "onnx:nowhere.onnx")
    monkeypatch.setenv("BOXCAL_DATABASE_URL", f"sqlite:///{tmp_path}/broken.sqlite3")
    monkeypatch.setattr(limits, "MAX_UPLOAD_BYTES", 2**62)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("BOXCAL_PORT", str(port))
        found = checks(boxcal, 1)
    assert [name for name, (ok, _) in found.items() if ok] == ["sandbox"]
    assert "nowhere.onnx does not exist" in found["model"][1]
    assert "not a database" in found["registry"][1]
    assert "an upload may have 4,611,686,018,427,387,904" in found["disk"][1]
    assert f"cannot listen on 127.0.0.1:{port}" in found["port"][1]


def test_the_port_of_a_running_service_is_no_fault(
    boxcal: Boxcal, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("BOXCAL_PORT", url.rpartition(":")[2])
    used = f"{url.removeprefix('http://')} is in use by a running boxcal, which serves digits"
    assert checks(boxcal, 0)["port"] == (True, used)
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # else `serve` starts this process anew
    boxcal("serve").refuses(used, 3)


def test_version(boxcal: Boxcal) -> None:
    ended = boxcal("--version")
    assert (ended.code, ended.stdout) == (0, f"boxcal {version('boxcal')}\n")


@pytest.mark.parametrize("command", [("serve",), ("doctor",), ("predict", __file__)])
def test_a_misspelt_variable_stops_the_command(
    boxcal: Boxcal, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # else `serve` starts this process anew
    monkeypatch.setenv("BOXCAL_MAX_BATCHSIZE", "8")
    boxcal(*command).refuses("BOXCAL_MAX_BATCHSIZE is not a setting; did you mean BOXCAL_MAX_BATCH_SIZE?")


def test_doctor_refuses_the_tables_that_serve_refuses(
    boxcal: Boxcal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sqlite3.connect(tmp_path / "old.db") as connection:
        connection.execute("CREATE TABLE alembic_version (version_num)")
        connection.execute("INSERT INTO alembic_version VALUES ('0008')")
    monkeypatch.setenv("BOXCAL_DATABASE_URL", f"sqlite:///{tmp_path / 'old.db'}")
    ok, found = checks(boxcal, 1)["registry"]
    assert not ok
    assert "is at revision '0008'; this release accepts '0012'" in found


def test_a_database_that_does_not_answer_is_told_soon_and_is_no_misuse(
    boxcal: Boxcal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BOXCAL_DATABASE_URL", f"postgresql://boxcal@/boxcal?host={tmp_path}&port=8130")
    assert f"{tmp_path}/.s.PGSQL.8130" in checks(boxcal, 1)["registry"][1]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("BOXCAL_DATABASE_URL", f"postgresql+psycopg://boxcal@{address}/boxcal")
        began = time.monotonic()
        assert "timeout expired" in checks(boxcal, 1)["registry"][1]
        assert time.monotonic() - began < 60  # libpq waits for two minutes
        for command in (("keys", "list"), ("migrate",), ("prune", "--keep-versions", "3")):
            boxcal(*command).refuses("The registry does not answer: ", 3)
    boxcal("keys", "list").refuses("The registry does not answer: ", 3)


@pytest.mark.parametrize("revision", ["0012", "0013"])
def test_migrate_names_the_revision_that_the_tables_have(
    boxcal: Boxcal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, revision: str
) -> None:
    monkeypatch.setenv("BOXCAL_DATABASE_URL", f"sqlite:///{tmp_path / 'registry.db'}")
    assert boxcal("migrate").stdout == "The registry has the tables of revision 0012.\n"
    with sqlite3.connect(tmp_path / "registry.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = ?", (revision,))
    assert boxcal("migrate").stdout == f"The registry has the tables of revision {revision}.\n"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["BOXCAL_UDS"], "BOXCAL_UDS is no longer a setting: set BOXCAL_HOST=unix:PATH"),
        (["BOXCAL_MODELS"], "BOXCAL_MODELS is no longer a setting: BOXCAL_MODEL takes the list of models"),
        (["BOXCAL_MAX_PIXELS"], "no longer a setting"),
        (["BOXCAL_OPTIMIZE"], "no longer a setting"),
        (["BOXCAL_DECODE_THREADS"], "no longer a setting"),
        (["BOXCAL_URL", "BOXCAL_MODEL", "boxcal_port", "PATH", "BOX"], "None"),
        (["BOXCAL_QQQQ"], "BOXCAL_QQQQ is not a setting"),
    ],
)
def test_a_removed_setting_names_its_successor(names: list[str], said: str) -> None:
    assert said in str(unknown_variable(names))


def test_the_variables_of_a_kubernetes_service_are_explained(
    boxcal: Boxcal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes sets these for every pod in the namespace of a Service named `boxcal`."""
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # otherwise `serve` starts this process again
    for name, value in (
        ("PORT", "tcp://10.0.0.7:8000"),
        ("PORT_8000_TCP", "tcp://10.0.0.7:8000"),
        ("PORT_8000_TCP_ADDR", "10.0.0.7"),
        ("SERVICE_HOST", "10.0.0.7"),
        ("SERVICE_PORT", "8000"),
    ):
        monkeypatch.setenv(f"BOXCAL_{name}", value)
    boxcal("serve").refuses("set `enableServiceLinks: false` in the specification of the pod")
