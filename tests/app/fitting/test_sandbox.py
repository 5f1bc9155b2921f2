"""What a worker that reads uploads cannot do, attempted in a real one."""

import asyncio
import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from boxcal.app.fitting.messages import BODY_FILE, Tabled, TableTask
from boxcal.app.fitting.server.worker_process import TaskRefused, Worker
from tests.app.fitting import hostile_worker
from tests.app.fitting.conftest import entered

HOSTILE = hostile_worker.__name__
ATTEMPTS = {
    "a file of the system": ("read", "/etc/shadow", "[Errno 13] Permission denied: '/etc/shadow'"),
    "registry": ("read", "{data}/boxcal.sqlite3", "[Errno 13] Permission denied: '{data}/boxcal.sqlite3'"),
    "the environment of the service": (
        "read", "/proc/PARENT/environ", "[Errno 13] Permission denied: '/proc/",
    ),
    "a connection": ("connect", "{port}", "[Errno 1] Operation not permitted"),
    "1,000 processes": ("fork", "1000", "[Errno 1] 1000 forks refused"),
    "a program": ("execute", "/bin/true", "[Errno 1] Operation not permitted"),
    "a signal to the service": ("signal", "23", "[Errno 1] Operation not permitted"),
    "a file in the data folder": ("write", "{data}/new", "[Errno 13] Permission denied: '{data}/new'"),
    "a file in the package": ("write", "{code}", "[Errno 13] Permission denied: '{code}'"),
}  # fmt: skip


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, object]]:
    (tmp_path / "boxcal.sqlite3").write_bytes(b"keys")
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield {"data": tmp_path, "port": server.getsockname()[1], "code": hostile_worker.__file__}


def ask(folder: Path, *bodies: str) -> list[str]:
    """Let one worker after the other attempt what a body says; returns what it answers."""

    async def run() -> list[str]:
        worker, answers = Worker(60.0, folder=folder), []
        for body in bodies:
            (folder / BODY_FILE).write_text(body)
            try:
                answers.append(str(await worker.run(TableTask(folder, 1, 1, 1), Tabled)))
            except TaskRefused as error:
                answers.append(str(error))
        await worker.close()
        return answers

    return asyncio.run(run())


@pytest.mark.usefixtures("whole_sandbox")
@pytest.mark.parametrize("case", ATTEMPTS.values(), ids=ATTEMPTS)
def test_a_reader_of_uploads_is_refused_and_that_is_logged(
    places: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    case: tuple[str, str, str],
) -> None:
    name, argument, error = (text.format_map(places) for text in case)
    monkeypatch.setattr("boxcal.app.fitting.server.worker_process.MODULE", HOSTILE)
    (folder := tmp_path / "work" / "upload").mkdir(parents=True)
    (answer,) = ask(folder, f"{name} {argument}")
    assert error in answer
    (line,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert "The table upload failed:" in line.getMessage()
    assert f"PermissionError: {error}" in line.getMessage()


@pytest.mark.parametrize(("name", "argument", "error"), ATTEMPTS.values(), ids=ATTEMPTS)
def test_without_the_sandbox_the_attempts_succeed(
    places: dict[str, object], tmp_path: Path, name: str, argument: str, error: str
) -> None:
    argument = "1" if name == "fork" else argument.format_map(places)
    if name == "write" and argument == places["code"]:
        (tmp_path / "code").write_bytes(b"")
        argument = str(tmp_path / "code")
    done = subprocess.run(
        [sys.executable, "-m", HOSTILE, name, argument], capture_output=True, text=True, check=False
    )
    if name == "read" and "Permission denied: '/etc/shadow'" in done.stderr:
        pytest.skip("only the administrator reads it")
    assert done.returncode == 0, (error, done.stderr)


@pytest.mark.usefixtures("whole_sandbox")
def test_how_uploads_are_read_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr("boxcal.app.fitting.server.worker_process.MODULE", HOSTILE)
    with caplog.at_level(logging.INFO, "boxcal"):
        answers = ask(tmp_path, "read /etc/shadow", "read /etc/shadow")
    assert len(answers) == 2
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert said == [
        "Uploads are read in a sandbox: no network, no files of the service, no new processes, no new rights"
    ]


@pytest.mark.usefixtures("whole_sandbox")
def test_what_a_host_forbids_is_named_and_the_rest_is_on(tmp_path: Path) -> None:
    """The second time, in one process, the first sandbox forbids what containers often forbid."""
    assert entered(tmp_path) == ["", "namespaces of users and networks: Operation not permitted"]


def test_what_is_missing_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    worker, missing = Worker(60.0), "Landlock: Function not implemented"
    for _ in range(2):
        worker._log([missing])
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == f"This host allows only a part of the sandbox of uploads: {missing}"
