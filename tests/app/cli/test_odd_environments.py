"""Other encodings than UTF-8, proxies that do not exist, and folders with unusual names."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sqlalchemy
from pydantic import ValidationError

from boxcal.app.cli import doctor
from boxcal.app.cli.output import write_json
from boxcal.app.client import BoxcalClient, InvalidUrlError
from boxcal.app.http.problems import BoxcalError, RegistryUnavailable
from boxcal.app.registry.activator import Activator
from boxcal.app.registry.database import Database
from boxcal.app.registry.maintenance import migrate
from boxcal.app.settings.service import Settings
from tests.app.cli.conftest import Boxcal

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}
IMAGE = Path(__file__).parents[3] / "docs/images/digit.png"
COMPARE = "from boxcal.app.cli import main; main()"
LOAD = "import sys; from pathlib import Path; from boxcal.app.settings.config_file import load; "


def run(*arguments: object, **environment: str) -> str:
    command = [sys.executable, "-c", *map(str, arguments)]
    ended = subprocess.run(command, env=os.environ | environment, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.decode("ascii")


def test_a_comparison_is_printed_in_ascii_and_saved_in_utf_8(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    logits = 6.0 * rng.normal(size=(60, 3))
    labels = (logits / 6.0 + rng.gumbel(size=(60, 3))).argmax(1)
    np.savez(tmp_path / "v.npz", logits=logits, labels=labels)
    saved = tmp_path / "c.md"
    shown = run(COMPARE, "compare", tmp_path / "v.npz", "--method", "ts", "--markdown", saved, **ASCII)
    assert "\\u25bc" in shown
    assert "▼" in saved.read_text("utf-8")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_a_document_is_json_in_every_encoding(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    write_json({"Süß": "日本 ▼"})
    stream.flush()
    assert json.loads(stream.buffer.getvalue().decode(encoding)) == {"Süß": "日本 ▼"}


def test_a_config_file_is_utf_8_in_every_locale(tmp_path: Path) -> None:
    (file := tmp_path / "boxcal.toml").write_text('labels = "Größe"', encoding="utf-8")
    assert (
        run(LOAD + "print(ascii(load(Path(sys.argv[1]))))", file, **ASCII) == "{'labels': 'Gr\\xf6\\xdfe'}\n"
    )


@pytest.mark.parametrize(
    ("name", "value"), [("ALL_PROXY", "socks://127.0.0.1:1"), ("SSL_CERT_FILE", "/nowhere/ca.pem")]
)
def test_a_proxy_or_authority_that_cannot_be_used_is_named(
    boxcal: Boxcal, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidUrlError, match=f"what {name} names cannot be used: "):
        BoxcalClient()
    boxcal("predict", IMAGE, "--url", "http://127.0.0.1:9").refuses(
        f"error: what {name} names cannot be used: "
    )


@pytest.mark.parametrize("folder", ["/tmp/a?mode=ro", "/t/100%41#x", "/t/sp aß:@", "/plain"])  # noqa: S108
def test_the_registry_lies_in_the_data_folder(folder: str) -> None:
    url = sqlalchemy.make_url(Settings(data_dir=Path(folder)).registry_url)
    assert (url.database, dict(url.query)) == (f"{folder}/boxcal.sqlite3", {})


def test_a_data_folder_is_text() -> None:
    with pytest.raises(ValidationError, match=r"'/lat\\udcfcin' holds bytes that are no text in this locale"):
        Settings(data_dir=Path(os.fsdecode(b"/lat\xfcin")))


def test_the_address_of_other_tools_is_corrected() -> None:
    with pytest.raises(BoxcalError, match="begins with postgres://: write postgresql://"):
        Database("postgres://user@localhost/boxcal")


def test_doctor_finds_a_registry_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = Settings(data_dir=tmp_path, database_url=None)
    migrate(settings.registry_url)
    assert "answers and has 12 tables" in doctor.registry(settings)
    # The file is another user's; root may write everything.
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path / "boxcal.sqlite3")
    with pytest.raises(PermissionError, match=r"boxcal\.sqlite3 cannot be written"):
        doctor.registry(settings)


def test_a_start_without_a_registry_says_why() -> None:
    def active() -> None:
        raise RegistryUnavailable("The registry does not answer: database or disk is full.")

    registry: Any = SimpleNamespace(activations=SimpleNamespace(active=active))
    with pytest.raises(
        RegistryUnavailable, match=r"disk is full\. The data folder has no calibrator of this"
    ):
        Activator(registry, 3, telemetry=None)  # type: ignore[arg-type]
