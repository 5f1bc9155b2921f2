"""HAProxy and nginx as deployed: their configurations are valid, and restarts fail no request."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.app.fitting.service import Service, free_port
from tests.app.registry.postgresql import PostgreSQL, is_installed
from tests.app.steady_load import SteadyLoad
from tests.deploy.processes import ROOT, running, wait_until

FILES = {
    "haproxy": ROOT / "deploy" / "haproxy" / "haproxy.cfg",
    "nginx": ROOT / "deploy" / "nginx" / "nginx.conf",
}
RATE, RESTARTS = 150, 10
LISTENS = {"haproxy": "bind :", "nginx": "listen "}


def program(name: str) -> str:
    found = shutil.which(name, path="/usr/sbin:/usr/bin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def configured(name: str, folder: Path, port: int, ports: list[int]) -> Path:
    """The deployed configuration with the names of the replicas turned into addresses."""
    text = FILES[name].read_text()
    for number, replica in enumerate(ports, 1):
        assert f"boxcal-{number}:8000" in text
        text = text.replace(f"boxcal-{number}:8000", f"127.0.0.1:{replica}")
    assert f"{LISTENS[name]}8080" in text
    text = text.replace(f"{LISTENS[name]}8080", f"{LISTENS[name]}{port}")
    (file := folder / FILES[name].name).write_text(text)
    return file


def command(name: str, file: Path, *, checks: bool) -> list[str]:
    if name == "haproxy":
        return [program(name), "-c" if checks else "-db", "-f", str(file)]
    globals_ = f"daemon off; pid {file.parent}/nginx.pid; error_log {file.parent}/nginx.error;"
    return [program(name), *(["-t"] if checks else []), "-c", str(file), "-g", globals_]


def is_marked(log: Path, server: str, state: str) -> bool:
    """Whether HAProxy has told so of a server last; nginx, which does not check servers, tells nothing."""
    told = [line for line in log.read_text().splitlines() if f"Server predictions/{server} is " in line]
    return log.name.startswith("nginx") or (bool(told) and f"is {state}" in told[-1])


@contextmanager
def balancer(name: str, folder: Path, ports: list[int]) -> Iterator[int]:
    port = free_port()
    file = configured(name, folder, port, ports)
    with running(command(name, file, checks=False), folder / f"{name}.log") as process:
        url = f"http://127.0.0.1:{port}/health/ready"
        wait_until(lambda: httpx.get(url).is_success, name, 30, process)
        yield port


@pytest.mark.parametrize("name", FILES)
def test_the_configuration_is_valid_and_a_misspelt_word_is_refused(name: str, tmp_path: Path) -> None:
    file = configured(name, tmp_path, free_port(), [free_port(), free_port()])
    checked = subprocess.run(command(name, file, checks=True), check=False, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    file.write_text(file.read_text().replace("retries 3", "retrys 3").replace("least_conn", "least_con"))
    checked = subprocess.run(command(name, file, checks=True), check=False, capture_output=True, text=True)
    assert checked.returncode != 0


@pytest.mark.long
@pytest.mark.parametrize("name", FILES)
def test_ten_rolling_restarts_fail_no_request(name: str, tmp_path: Path) -> None:
    if not is_installed():
        pytest.skip("PostgreSQL is not installed")
    program(name)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="boxcal-postgresql-")))
        database = PostgreSQL(folder)
        database.start()
        stack.callback(database.stop)
        settings = {"database_url": database.new_database(), "model": "logits:4"}
        replicas = [
            stack.enter_context(Service(tmp_path / number, **settings)) for number in ("one", "other")
        ]
        ports = [int(replica.url.rpartition(":")[2]) for replica in replicas]
        port = stack.enter_context(balancer(name, tmp_path, ports))
        with SteadyLoad(port, RATE) as load:
            log = tmp_path / f"{name}.log"
            for _ in range(RESTARTS):
                for replica, server in zip(replicas, ("one", "two"), strict=True):
                    assert replica.stop() == 0
                    wait_until(partial(is_marked, log, server, "DOWN"), f"{server} is down", 9)
                    replica.start()
                    wait_until(
                        lambda: all(one.client.get("/health/ready").is_success for one in replicas), "both", 9
                    )
                    wait_until(partial(is_marked, log, server, "UP"), f"{server} is up", 9)
        assert len(load.seconds) > RATE
        assert not load.failures
