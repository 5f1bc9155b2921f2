"""One running service for all tests that leave it as they found it; and what the sandbox cannot do here."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.app.fitting.service import Service

ENTER_TWICE = """
import sys
from pathlib import Path
from boxcal.app.fitting.sandbox import enter_sandbox
print(*enter_sandbox(Path(sys.argv[1])), sep="; ")
print(*enter_sandbox(Path(sys.argv[1])), sep="; ")
"""


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service over an empty data folder, which takes uploads of at most 4 MB; its model has gradients."""
    running = Service(
        tmp_path_factory.mktemp("refit") / "data",
        prelude="from boxcal.app.settings import limits; limits.MAX_UPLOAD_BYTES = 4_000_000",
    )
    running.has_torch = True
    with running:
        yield running


def entered(folder: Path) -> list[str]:
    """What is missing when a process enters the sandbox, and when it does so again."""
    command = [sys.executable, "-c", ENTER_TWICE, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.fixture(scope="module")
def whole_sandbox(tmp_path_factory: pytest.TempPathFactory) -> None:
    if missing := entered(tmp_path_factory.mktemp("folder"))[0]:
        pytest.skip(missing)
