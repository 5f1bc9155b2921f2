"""Pauses of the event loop: the histogram, the log line with the function, and tests that cause some."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from boxcal.app.observability.event_loop import StallLog
from boxcal.app.server import Server, server_config
from boxcal.app.settings.service import Settings
from tests.app.running import listening
from tests.app.waiting import until

ROOT = Path(__file__).parents[2]


async def sleeps_on_the_loop() -> dict[str, str]:
    time.sleep(0.36)  # noqa: ASYNC251
    return {}


def pauses(url: str) -> float:
    """Give how many beats were late by more than 250 ms."""
    name = "boxcal_event_loop_pause_seconds"
    lines = dict(line.rsplit(" ", 1) for line in httpx.get(f"{url}/metrics").text.splitlines())
    return float(lines[f"{name}_count"]) - float(lines[f'{name}_bucket{{le="0.25"}}'])


def test_a_pause_is_counted_and_logged_once_with_the_function(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = server_config(Settings(data_dir=tmp_path, port=0))
    config.app.add_api_route("/sleeps", sleeps_on_the_loop)  # type: ignore[union-attr]
    with listening(Server(config)) as port:
        url = f"http://127.0.0.1:{port}"
        time.sleep(0.2)  # some beats
        before = pauses(url)
        assert httpx.get(f"{url}/sleeps").is_success
        until(lambda: pauses(url) > before)
    lines = [one.getMessage() for one in caplog.records if "sleeps_on_the_loop" in one.getMessage()]
    assert len(lines) == 1
    assert "it is in sleeps_on_the_loop (app/test_event_loop.py:" in lines[0]


def test_beats_that_are_on_time_are_counted_as_no_pause(tmp_path: Path) -> None:
    began = time.monotonic()
    with listening(Server(server_config(Settings(data_dir=tmp_path, port=0)))) as port:
        url = f"http://127.0.0.1:{port}"
        time.sleep(1)
        name = "boxcal_event_loop_pause_seconds_count"
        count = next(
            line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(name + " ")
        )
        most = (time.monotonic() - began) / 0.05 + 1  # one each 50 ms; fewer where the machine is busy
        assert 2 <= float(count.split()[1]) <= most


def test_pauses_shortly_after_another_are_counted_in_the_next_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    log = StallLog()
    with caplog.at_level("WARNING", "boxcal"):
        log(0.3, "first")
        now = 109.9
        log(0.3, "second")
        log(0.3, "third")
        now = 110.0
        log(0.4, "fourth")
    assert [record.getMessage() for record in caplog.records] == [
        "The event loop has not run for 0.30 s (0 earlier pauses were not logged); it is in first",
        "The event loop has not run for 0.40 s (2 earlier pauses were not logged); it is in fourth",
    ]


CASES = """
import time
import httpx, pytest
from boxcal.app.server import Server, server_config
from boxcal.app.settings.service import Settings
from tests.app.running import listening

async def burns(milliseconds: int) -> dict[str, str]:
    end = time.thread_time() + milliseconds / 1000
    while time.thread_time() < end:
        pass
    return {}

async def sleeps() -> dict[str, str]:
    time.sleep(0.3)
    return {}

@pytest.fixture(scope="session")
def url(tmp_path_factory):
    config = server_config(Settings(data_dir=tmp_path_factory.mktemp("data"), port=0))
    config.app.add_api_route("/burns", burns)
    config.app.add_api_route("/sleeps", sleeps)
    with listening(Server(config)) as port:
        yield f"http://127.0.0.1:{port}"

def test_150(url):
    assert httpx.get(f"{url}/burns?milliseconds=150").is_success

def test_50(url):
    assert httpx.get(f"{url}/burns?milliseconds=50").is_success

def test_sleep(url):
    assert httpx.get(f"{url}/sleeps").is_success
"""


@pytest.mark.long
def test_a_test_that_computes_on_the_event_loop_fails(tmp_path: Path) -> None:
    (tmp_path / "test_cases.py").write_text(CASES)
    options = ["-p", "tests.conftest", "-p", "no:cacheprovider", "-rA", "-v", f"--rootdir={tmp_path}"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 1, run.stdout
    assert "1 failed, 2 passed" in run.stdout
    failed = next(line for line in run.stdout.splitlines() if line.startswith("FAILED"))
    assert "test_cases.py::test_150" in failed
    message = next(line for line in run.stdout.splitlines() if "computed for more than 0.1 s: 0.1" in line)
    assert " in burns (" in message
