"""A real service in a process of its own, which a test may kill at any moment and start again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import httpx
import psutil

START_SECONDS = 240.0


class Started(Protocol):
    """A running process, as `subprocess.Popen` gives it."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end."""

    def send_signal(self, sig: signal.Signals, /) -> None:
        """Send a signal."""


class Service:
    """`boxcal serve` over one data folder, at the same URL over restarts; `source` is another release.

    Unless `has_torch` is set it runs as it does where torch is not installed.
    """

    has_torch = False

    def __init__(self, data_dir: Path, *, prelude: str = "", source: str = "", **settings: str) -> None:
        self.data_dir = data_dir
        self._source = source or None
        self._program = f"{prelude}\nfrom boxcal.app.cli import main; main()"
        self._port = free_port()
        self.url = f"http://{'[::1]' if settings.get('host') == '::1' else '127.0.0.1'}:{self._port}"
        self.environment = {
            **os.environ,
            "BOXCAL_DATA_DIR": str(data_dir),
            "BOXCAL_PORT": str(self._port),
            "OMP_NUM_THREADS": "1",
            **{f"BOXCAL_{name.upper()}": value for name, value in settings.items()},
        }
        if source:
            self.environment["PYTHONPATH"] = source
        self._process: Started | None = None
        self.client = httpx.Client(base_url=self.url, timeout=280)

    @property
    def process(self) -> psutil.Process:
        assert self._process is not None
        return psutil.Process(self._process.pid)

    def start(self) -> Self:
        self._process = self._spawn()
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            assert self._process.poll() is None, self.log()
            try:
                if self.client.get("/health/ready").is_success:
                    return self
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError(f"not ready after {START_SECONDS} s:\n{self.log()}")

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM, and wait for the end; gives the exit status."""
        return self._end(signal.SIGTERM)

    def wait(self) -> int:
        """Wait for its end; gives the exit status."""
        assert self._process is not None
        return self._process.wait(timeout=280)

    def fit(self, data: bytes, wait: float = 240, **fields: str) -> httpx.Response:
        """Upload a file, and wait for its fit unless `wait` is 0."""
        query = {"wait": wait} if wait else {}
        return self.client.post("/fit", params=query, files={"file": ("v", data)}, data=fields)

    def log(self) -> str:
        return (self.data_dir / "service.log").read_text()

    def __enter__(self) -> Self:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()
        if self._process is not None and self._process.poll() is None:
            self.stop()

    def _spawn(self) -> Started:
        with (self.data_dir / "service.log").open("ab") as log:
            hidden = "" if self.has_torch else "import sys; sys.modules['torch'] = None\n"
            command = [sys.executable, "-c", hidden + self._program, "serve"]
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, cwd=self._source)

    def _end(self, how: signal.Signals) -> int:
        assert self._process is not None
        self._process.send_signal(how)
        return self.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
