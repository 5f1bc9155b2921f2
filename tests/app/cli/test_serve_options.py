"""What `boxcal serve` takes: an option for each setting, a config file; and what stops it at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from boxcal.app.cli.settings import setting_options
from boxcal.app.settings.service import Settings
from tests.app.cli.conftest import Boxcal

CONFIG = """
port = {port}
max_batch_size = 7
labels = "names.txt"
fit_memory_bytes = 300000000
allow_anonymous = true
"""
MODELS = """
[models.a]
model = "digits"
share = 2

[models.b]
model = "logits:3"
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "")  # otherwise `serve` starts this process again
    monkeypatch.setenv("BOXCAL_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("BOXCAL_CONFIG", "")  # put back after commands that set it


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_every_setting_is_an_option_and_is_explained(boxcal: Boxcal) -> None:
    assert [option.name for option in setting_options()] == list(Settings.model_fields)
    shown = boxcal("serve", "--help").stdout
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in shown


def test_options_come_before_the_environment_and_that_before_the_config_file(
    boxcal: Boxcal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, taken: int
) -> None:
    (file := tmp_path / "boxcal.toml").write_text(CONFIG.format(port=taken))
    monkeypatch.setenv("BOXCAL_CONFIG", str(file))
    monkeypatch.setenv("BOXCAL_MAX_BATCH_SIZE", "8")
    read = Settings(feedback_rows=2)
    assert (read.port, read.max_batch_size, read.feedback_rows) == (taken, 8, 2)
    assert (read.labels, read.allow_anonymous) == (Path("names.txt"), True)
    monkeypatch.setenv("BOXCAL_CONFIG", "")
    message = f"cannot listen on 127.0.0.1:{taken}: Address already in use"
    for arguments in (("--config", file), ("--port", taken)):
        boxcal("serve", *arguments).refuses(message, 3)


def test_a_config_file_can_have_the_models(boxcal: Boxcal, tmp_path: Path) -> None:
    (file := tmp_path / "boxcal.toml").write_text("port = 0\ndevice = 'cpu'\n" + MODELS)
    (model, *_) = boxcal("doctor", "--config", file, "--json").json
    assert model["found"] == "a: 10 classes on cpu; b: no model; /calibrate takes logits of 3 classes"
    assert [entry.share for entry in Settings().entries()] == [2.0, 1.0]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.toml", "modle = 'digits'", "a.toml: modle is not a setting; did you mean 'model'?"),
        ("a.toml", "port = 'x'", "a.toml: port: Input should be a valid integer"),
        ("a.toml", "port = ", "a.toml is not TOML"),
        ("a.toml", None, "a.toml cannot be read: No such file or directory"),
        ("a.toml", "[models.a]\nshare = 2", "a.model: Field required"),
        ("a.yaml", "port: 1", "is not a `.toml` file"),
    ],
)
def test_a_config_file_that_cannot_be_used_is_named(
    boxcal: Boxcal, tmp_path: Path, name: str, content: str | None, reason: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    boxcal("serve", "--config", tmp_path / name).refuses(reason)


BAD_WEBHOOKS = ("ftp://host/x", "https://", "http://[::1/x", "http://host:99999/x", "hooks.example.com")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--port", "70000"), "--port: Input should be less than or equal to 65535, got 70000"),
        (("--model", "a=digits,b"), "--model: 'b' is not NAME=MODEL"),
        (("--precision", "int8"), "'int8' is not one of"),
        (("--modle", "digits"), "No such option: --modle"),
        (("--alarm-webhook", "http://x"), "error: alarm_webhook needs alarm_secret"),
        *((("--alarm-webhook", url), "alarm_webhook must be an http or https URL") for url in BAD_WEBHOOKS),
        (("--tls-cert", "a.pem"), "BOXCAL_TLS_KEY: BOXCAL_TLS_CERT and BOXCAL_TLS_KEY must be set together"),
        (("--tls-client-ca", "a.pem"), "--tls-client-ca: it needs BOXCAL_TLS_CERT: without HTTPS no client"),
        (("--shared-dir", "gs://bucket/a"), "'gs://bucket/a' is neither a directory nor s3://BUCKET/PREFIX"),
        (("--host", "unix:"), "--host: 'unix:' names no socket; write unix:PATH"),
        (("--port", "8009", "--grpc-port", "8009"), "error: grpc_port is 8009, which is the port of HTTP"),
        (("--shared-dir", "s3:/bucket"), "'s3:/bucket' is neither a directory nor s3://BUCKET/PREFIX"),
        (("--shared-dir", "s3://"), "--shared-dir: 's3://' is neither a directory nor s3://BUCKET/PREFIX"),
    ],
)
def test_an_option_that_cannot_be_used_is_named(
    boxcal: Boxcal, arguments: tuple[str, ...], reason: str
) -> None:
    boxcal("serve", *arguments).refuses(reason)


@pytest.mark.parametrize(
    "name",
    ["MODEL", "DEVICE", "HOST", "DATA_DIR", "DATABASE_URL", "SHARED_DIR", "ALARM_WEBHOOK", "ALARM_SECRET"],
)
def test_a_template_that_was_not_filled_in_is_told(
    boxcal: Boxcal, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"BOXCAL_{name}", "")
    for command in ("serve", "worker"):
        boxcal(command).refuses(f"error: BOXCAL_{name}: it is empty; leave it out for the default")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_taken_port_is_told_before_the_model_is_loaded(boxcal: Boxcal, taken: int, workers: int) -> None:
    for option in ("--port", "--grpc-port"):
        ended = boxcal("serve", "--model", "onnx:nowhere.onnx", "--workers", workers, option, taken)
        ended.refuses(f"cannot listen on 127.0.0.1:{taken}", 3)


def test_a_folder_that_cannot_be_written_is_named_without_a_traceback(boxcal: Boxcal, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "data", Path("/proc/boxcal")):
        ended = boxcal("serve", "--data-dir", folder)
        ended.refuses(f"boxcal: error: BOXCAL_DATA_DIR: cannot write to {folder}: ", 3)
        assert "Traceback" not in ended.stderr


def test_a_shared_directory_that_cannot_be_written_is_named(boxcal: Boxcal, tmp_path: Path) -> None:
    given = ("--data-dir", tmp_path, "--port", 0, "--shared-dir", "/proc/boxcal")
    ended = boxcal("serve", *given)
    assert "BOXCAL_SHARED_DIR: cannot write to /proc/boxcal: No such file or directory" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_files_of_tls_that_cannot_be_loaded_are_named(
    boxcal: Boxcal, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    monkeypatch.setenv("BOXCAL_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("BOXCAL_TLS_CERT", "none.pem")
    monkeypatch.setenv("BOXCAL_TLS_KEY", "none.key")
    ended = boxcal(command)
    said = "BOXCAL_TLS_CERT, none.pem, and BOXCAL_TLS_KEY, none.key, cannot be loaded: [Errno 2] No such file"
    assert said in " ".join((ended.stdout + ended.stderr).split())
    assert ended.code in {1, 3}


def test_the_shell_completes_commands_options_and_values() -> None:
    def completed(words: str) -> list[str]:
        given = {"_BOXCAL_COMPLETE": "complete_bash", "COMP_WORDS": words}
        place = {"COMP_CWORD": str(len(words.split(" ")) - 1)}
        program = "import sys; sys.argv = ['boxcal']; from boxcal.app.cli import main; main()"
        command, environment = [sys.executable, "-c", program], os.environ | given | place
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        ).stdout.split()

    assert "serve" in completed("boxcal ser")
    assert "--max-batch-size" in completed("boxcal serve --max-b")
    assert completed("boxcal serve --precision b") == ["bfloat16"]
