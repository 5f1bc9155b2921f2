"""What the tests of the command line share: a service of their own, files, and the command itself."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boxcal.app.cli import main, output
from boxcal.models.digits_data import Digits
from tests.app.fitting.validation_data import overconfident


@dataclass(frozen=True)
class Finished:
    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> Any:
        """The one document of a `--json` run; anything else on stdout fails here."""
        return json.loads(self.stdout)

    def refuses(self, says: str, code: int = 2) -> None:
        """Check that it ended with this code and says this on stderr, wherever lines are broken."""
        assert (self.code, says in " ".join(self.stderr.split())) == (code, True), self.stderr


Boxcal = Callable[..., Finished]


@pytest.fixture
def boxcal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Boxcal:
    """Run the command as its console script does, in this process, in a terminal of 100 columns."""
    # A console reads COLUMNS when it is made; other test modules import this one before.
    for console in (output.screen(), output.messages()):
        monkeypatch.setattr(console, "width", 100)

    def run(*arguments: object) -> Finished:
        monkeypatch.setattr(sys, "argv", ["boxcal", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return Finished(int(ended.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def url(busy_url: str) -> str:
    return busy_url


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory, digits: Digits) -> Path:
    path = tmp_path_factory.mktemp("image") / "digit.png"
    path.write_bytes(digits.png(0))
    return path


@pytest.fixture(scope="session")
def validation_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("validation") / "validation.npz"
    logits, labels = overconfident()
    np.savez(path, logits=logits, labels=labels)
    return path
