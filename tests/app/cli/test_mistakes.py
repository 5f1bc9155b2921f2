"""What users get wrong: one clear line on stderr, nothing on stdout, the exit code of its kind."""

import errno
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from boxcal.app.cli.output import UsageError
from boxcal.app.cli.predict import read_bounds
from boxcal.app.client import Fit, FitNotSucceededError
from boxcal.app.demo.__main__ import address
from boxcal.calibrators import Calibrator
from tests.app.cli.conftest import Boxcal
from tests.app.client.scripted import FIT
from tests.app.fitting.service import free_port

COMMAND = Path(sys.executable).with_name("boxcal")


def refused(boxcal: Boxcal, code: int, *arguments: object) -> str:
    """Run a command that must fail and return its one line."""
    ended = boxcal(*arguments)
    assert ended.code == code
    assert not ended.stdout
    (line,) = ended.stderr.splitlines()
    assert line.startswith("boxcal: error: ")
    return line


def test_what_does_not_fit_into_memory_is_no_defect(boxcal: Boxcal, tmp_path: Path) -> None:
    """Structured matrix scaling of 400,000 classes starts with a matrix of 1.2 TiB."""
    logits = np.zeros((20, 400_000), np.float32)
    logits[np.arange(20), np.arange(20)] = 5.0
    np.savez(tmp_path / "v.npz", logits=logits, labels=np.arange(20))
    line = refused(boxcal, 1, "fit", tmp_path / "v.npz", "--method", "sms", "--output", tmp_path / "m.st")
    assert "error: this machine has too little memory for it: Unable to allocate 1.16 TiB" in line


HERE: list[tuple[tuple[str, ...], str]] = [
    (("fit", "nowhere.npz"), "nowhere.npz"),
    (("fit", "digit.png", "--bogus"), "--bogus"),
    (("dance",), "'dance'"),
    (("predict", "digit.png", "--upper", "x"), "'x'"),
    (("predict", "digit.png", "--upper", "0.5", "--upper", "0.6"), "twice"),
    (("predict", "digit.png", "--url", "nonsense"), "'nonsense'"),
    (("predict", "digit.png", "--url", "http://h", "--calibrator", "a.bin"), "version"),
    (("predict", "digit.png", "--url", "http://h", "--output", "o.parquet"), "unset BOXCAL_URL"),
    (("predict", "digit.png", "--calibrator", "notes.txt"), "notes.txt: "),
    (("predict", "digit.png", "--calibrator", "nowhere"), "error: nowhere: No such file or directory"),
    (("evaluate", "wrong.npz", "--calibrator", "nowhere"), "error: nowhere: No such file or directory"),
    (("predict", "scores.csv", "--output", "o.csv", "--calibrator", "notes.txt"), "notes.txt: "),
    (("predict", "digit.png", "--calibrator", "five.safetensors"), "5 classes"),
    (("evaluate", "notes.txt"), "neither .npz nor .parquet"),
    (("prune", "--keep-versions", "1", "--keep-days", "1e300"), "less than or equal to 36500"),
]
ANYWHERE: list[tuple[tuple[str, ...], str]] = [
    (("predict", "digit.png", "--upper", "0.05"), "0.5"),
    (("predict", "digit.png", "--top-k", "0"), "top_k"),
    (("predict", "notes.txt"), "JPEG, PNG or WebP"),
    (("predict", "wrong.npz"), "wrong.npz is a table, not an image"),
    (("fit", "notes.txt"), "neither .npz nor .parquet"),
    (("fit", "wrong.npz"), "labels[0] is 10"),
    (("fit", "unnamed.csv"), "If `outcome` is it, set --label outcome."),
    (("fit", "wrong.npz", "--method", "magic"), "'magic'"),
]


@pytest.fixture
def files(tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digit.png").write_bytes(image.read_bytes())
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / "scores.csv").write_text("a,b\n1,2\n")
    (tmp_path / "five.safetensors").write_bytes(Calibrator.uncalibrated(5).to_bytes())
    (tmp_path / "unnamed.csv").write_text("0,1,2,3,4,5,6,7,8,9,outcome\n" + "1,2,3,4,5,6,7,8,9,-1,3\n" * 30)
    np.savez(tmp_path / "wrong.npz", logits=np.zeros((30, 10)), labels=np.full(30, 10))


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("arguments", "says"), HERE + ANYWHERE)
def test_a_mistake_is_named(boxcal: Boxcal, arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(boxcal, 2, *arguments)


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(("arguments", "says"), ANYWHERE)
def test_a_service_names_it_alike(boxcal: Boxcal, url: str, arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(boxcal, 2, *arguments, "--url", url)


@pytest.mark.parametrize("command", ["fit", "evaluate", "compare"])
def test_a_pipe_is_no_file(boxcal: Boxcal, command: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(pipe, b"0,1,label\n1,2,0\n")
    assert "pipe is a pipe, which cannot be read twice" in refused(boxcal, 2, command, tmp_path / "pipe")
    os.close(pipe)


def test_settings_are_named_as_they_are_set(
    boxcal: Boxcal, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOXCAL_MAX_BATCH_SIZE", "many")
    assert "BOXCAL_MAX_BATCH_SIZE" in refused(boxcal, 2, "predict", image)
    monkeypatch.delenv("BOXCAL_MAX_BATCH_SIZE")
    monkeypatch.setenv("BOXCAL_MODEL", "nosuch")
    assert "nosuch" in refused(boxcal, 2, "predict", image)
    monkeypatch.setenv("BOXCAL_URL", url := f"http://127.0.0.1:{free_port()}")
    assert url in refused(boxcal, 3, "predict", image)


def test_the_demo_says_how_to_name_another_address() -> None:
    port = str(free_port())
    demo, environment = [sys.executable, "-m", "boxcal.app.demo"], os.environ | {"BOXCAL_PORT": port}
    ended = subprocess.run(demo, check=False, capture_output=True, text=True, env=environment)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"demo: cannot reach http://127.0.0.1:{port}/")
    assert "--url or BOXCAL_URL" in ended.stderr


def test_the_demo_asks_the_service_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BOXCAL_PORT", "BOXCAL_URL"):
        monkeypatch.delenv(name, raising=False)
    assert address() == "http://127.0.0.1:8000"
    monkeypatch.setenv("BOXCAL_PORT", "81")
    assert address() == "http://127.0.0.1:81"
    monkeypatch.setenv("BOXCAL_URL", "http://far:9")
    assert address() == "http://far:9"


KEY = ("keys", "create", "web", "--scope", "admin")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--output", "nowhere/key"), "No such file or directory"),
        (("--expires-days", "1e300"), "'--expires-days': Input should be less than or equal to 36500"),
        (("--expires-days", "nan"), "Input should be less than or equal to 36500"),
        (("--per-minute", "9" * 20), "Input should be less than or equal to 2147483647"),
        (("--concurrency", "9" * 20), "Input should be less than or equal to 2147483647"),
    ],
)
def test_a_mistake_creates_no_key(
    boxcal: Boxcal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOXCAL_DATA_DIR", "data")
    assert says in refused(boxcal, 2, *KEY, *arguments)
    assert boxcal("keys", "list", "--json").json == []


def test_a_key_that_cannot_be_written_is_revoked(
    boxcal: Boxcal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOXCAL_DATA_DIR", "data")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("boxcal.app.cli.keys.os.fsync", full)
        assert "No space left on device" in refused(boxcal, 2, *KEY, "--output", "key")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    (key,) = boxcal("keys", "list", "--json").json
    assert key["revoked_at"] is not None


def test_names_are_shown_as_they_are(boxcal: Boxcal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BOXCAL_DATA_DIR", "data")
    name, file = "x[/foo]\x1b[2J", "[b].key"
    made = boxcal("keys", "create", name, "--scope", "read", "--output", file)
    assert made.stderr.endswith("(x[/foo]\\x1b[2J) is in [b].key.\n")
    assert "[b].key exists; no key was created." in boxcal(*KEY, "--output", file).stderr
    assert " x[/foo]\\x1b[2J " in boxcal("keys", "list").stdout
    assert "'\\x1b'" in refused(boxcal, 2, "\x1b")


@pytest.mark.parametrize("key", ["sec\nret", "geh\u00e4im"])
def test_a_key_that_no_header_can_hold_is_not_shown(
    boxcal: Boxcal, image: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("BOXCAL_API_KEY", key)
    said = refused(boxcal, 2, "predict", image, "--url", "http://127.0.0.1:1")
    assert said == ("boxcal: error: the API key has characters that are not printable ASCII; is it complete?")


def test_a_fit_that_fails_is_work_that_failed(
    boxcal: Boxcal, monkeypatch: pytest.MonkeyPatch, image: Path
) -> None:
    """A service cannot be made to fail a good fit at will; what the client then raises is raised here."""

    def fail(*_: object, **__: object) -> None:
        ended = {**FIT, "state": "interrupted", "error": "the service stopped"}
        raise FitNotSucceededError(Fit.model_validate(ended))

    monkeypatch.setattr("boxcal.app.cli.fit._here", fail)
    assert "fit f interrupted: the service stopped" in refused(boxcal, 1, "fit", image)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['boxcal', '--help']; from boxcal.app.cli import main\n"
        "try: main()\n"
        "except SystemExit: print([m for m in ('torch', 'numpy', 'pydantic', 'httpx') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "Exit codes" in done.stdout


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let children be interrupted also where the tests run behind a shell, in which SIGINT is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_interrupting_is_no_error(image: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        process = subprocess.Popen(
            [COMMAND, "predict", image, "--url", url], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        silent.settimeout(60)
        connection, _ = silent.accept()
        assert connection.recv(1)  # the request is on its way, and the command waits for its answer
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        connection.close()
    assert (process.returncode, output) == (130, b""), errors
    assert b"Traceback" not in errors


def test_progress_is_for_terminals(validation_file: Path, url: str, tmp_path: Path) -> None:
    """On a terminal the bar moves on stderr, and stdout still is one JSON document."""
    ours, theirs = pty.openpty()
    redirected = tmp_path / "fit.json"  # a document may be longer than what a pipe holds unread
    with redirected.open("wb") as output:
        process = subprocess.Popen(
            [COMMAND, "fit", validation_file, "--method=ts", "--activate=never", "--url", url, "--json"],
            stdout=output,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm"},
        )
    os.close(theirs)
    drawn = b""
    with suppress(OSError), os.fdopen(ours, "rb", buffering=0) as screen:  # an error once nobody writes
        while piece := screen.read(4096):
            drawn += piece
    assert process.wait(timeout=60) == 0
    document = redirected.read_bytes()
    assert b"fitting" in drawn
    assert b"%" in drawn
    assert document.startswith(b'{"method": "ts"')


@pytest.mark.parametrize(
    ("typed", "read"),
    [
        ([], None),
        (["0.75"], 0.75),
        (["a=0.1", "b=0.2"], {"a": 0.1, "b": 0.2}),
        (["x=y=0.5"], {"x=y": 0.5}),
        (["=0.5"], {"": 0.5}),
    ],
)
def test_bounds_as_they_are_typed(typed: list[str], read: object) -> None:
    assert read_bounds("lower", typed) == read


@pytest.mark.parametrize("typed", [["a"], ["nan"], ["a=inf"], ["0.1", "a=0.2"], ["a=0.1", "a=0.2"]])
def test_bounds_that_make_no_sense(typed: list[str]) -> None:
    with pytest.raises(UsageError, match="--upper"):
        read_bounds("upper", typed)
