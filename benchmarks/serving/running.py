"""Starts a server, waits until it is ready, and stops it with all its processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serving.contestants import PEERS, Contestant, Model, Task
from benchmarks.serving.payloads import free_port

READY_SECONDS = 180
BOXCAL = [str(Path(sys.executable).with_name("boxcal")), "serve"]


@dataclass(frozen=True)
class Server:
    contestant: Contestant
    port: int
    process: subprocess.Popen[bytes]

    def memory_bytes(self) -> int:
        """Return the memory of all its processes; shared pages are counted once (PSS)."""
        total = 0
        for process in _family(self.process.pid):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
        return total

    def processor_seconds(self) -> float:
        """Return the CPU time of all its processes."""
        total = 0.0
        for process in _family(self.process.pid):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total


def _family(pid: int) -> set[psutil.Process]:
    # Ray's processes leave the process tree and BentoML's leave the session that `start_new_session` made.
    members: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getsid(process.pid) == pid:
                members |= {process, *process.children(recursive=True)}
    return members


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=10).close()  # noqa: S310 - a server that was started here
    except (OSError, http.client.HTTPException):
        return False
    return True


@contextlib.contextmanager
def started(
    command: Sequence[str], url: str, settings: Mapping[str, str], folder: Path | None = None
) -> Iterator[psutil.Popen]:
    """Run a server, which answers at a URL, while the block runs."""
    environment, silent = {**os.environ, **settings}, subprocess.DEVNULL
    process = psutil.Popen(command, env=environment, cwd=folder, stdout=silent, stderr=silent)
    deadline = time.monotonic() + READY_SECONDS
    try:
        while not answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{command} did not start")
            time.sleep(0.005)
        yield process
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def service(**settings: object) -> Iterator[tuple[int, psutil.Popen]]:
    """Run boxcal with these settings on a free port and with a data folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        given = {"port": port, "data_dir": folder, **settings}
        variables = {f"BOXCAL_{name.upper()}": str(value) for name, value in given.items()}
        with started(BOXCAL, f"http://127.0.0.1:{port}/health/ready", variables) as process:
            yield port, process


def _end(process: subprocess.Popen[bytes]) -> None:
    family = _family(process.pid)
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    for member in family | _family(process.pid):
        with contextlib.suppress(psutil.Error):
            member.kill()
    process.wait()


@contextlib.contextmanager
def serving(contestant: Contestant, python: Path, model: Model, task: Task) -> Iterator[Server]:
    """Yield a server that is ready; delete its files and processes afterwards."""
    port = free_port()
    with tempfile.TemporaryDirectory(
        prefix=f"serving-{contestant.name}-", ignore_cleanup_errors=True
    ) as name:
        folder = Path(name)
        launch = contestant.launch(python, model, port, folder)
        environment = {
            **os.environ,
            "BENCH_MODEL": str(model.path),
            "BENCH_PORT": str(port),
            "BENCH_TASK": task,
            "PYTHONPATH": str(PEERS) if contestant.requirements else os.environ.get("PYTHONPATH", ""),
            **launch.environment,
        }
        log = folder / "server.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                launch.command,
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + READY_SECONDS
            while not answers(f"http://127.0.0.1:{port}{contestant.ready}"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"{contestant.name} did not get ready:\n{log.read_text()[-3000:]}")
                time.sleep(0.1)
            yield Server(contestant, port, process)
        finally:
            _end(process)


def run_part(name: str, *arguments: str, plan: dict[str, Any]) -> Any:
    """Run a module of this package in a process; plan and result are files."""
    with tempfile.TemporaryDirectory(prefix="serving-plan-") as folder:
        asked, answered = Path(folder, "plan.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(plan))
        module = [sys.executable, "-m", f"benchmarks.serving.{name}"]
        subprocess.run([*module, *arguments, str(asked), str(answered)], check=True)
        return json.loads(answered.read_text())
