"""A private PostgreSQL server on the loopback, which a test may stop, start, pause and kill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import psycopg

from tests.app.fitting.service import free_port

READY = "database system is ready to accept connections"


def program(name: str) -> str | None:
    """Path of a PostgreSQL program; Debian installs them outside PATH."""
    debian = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(debian[-1]) if debian else None)


def is_installed() -> bool:
    return program("initdb") is not None


class PostgreSQL:
    """A cluster in a new folder; it runs as the user `postgres` where the tests run as root."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._user: dict[str, Any] = {"user": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
        if self._user:
            shutil.chown(folder, user="postgres")
        self._data = folder / "data"
        self._databases = 0
        self._process: subprocess.Popen[str] | None = None
        self.port = free_port()
        subprocess.run(
            [program("initdb") or "", "-D", self._data, "-A", "trust", "-U", "boxcal", "--no-sync"],
            check=True, capture_output=True, cwd=folder, **self._user,
        )  # fmt: skip

    def start(self) -> None:
        log = self._folder / "log"
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [
                    program("postgres") or "", "-D", self._data, "-k", self._folder,
                    "-p", str(self.port), "-h", "127.0.0.1", "-c", "fsync=off",
                ],
                stderr=output, text=True, cwd=self._folder, **self._user,
            )  # fmt: skip
        with log.open() as lines:
            while READY not in lines.readline():
                assert self._process.poll() is None, log.read_text()
                time.sleep(0.01)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """End the server: SIGINT closes all connections, SIGQUIT ends it as a crash does."""
        assert self._process is not None
        self.resume()
        self._process.send_signal(how)
        self._process.wait()

    def pause(self) -> None:
        """Stop every process of the server with SIGSTOP: connections stay open, and nothing answers."""
        for process in self.processes():
            process.suspend()

    def resume(self) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):  # some end as soon as others continue
                process.resume()

    def new_database(self) -> str:
        self._databases += 1
        name = f"test{self._databases}"
        with psycopg.connect(f"{self._url}/postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}".encode())
        return f"{self._url}/{name}"

    def set_read_only(self, url: str, is_so: bool) -> None:
        """Make a database read-only, as a standby is, and end its sessions; or allow new ones to write."""
        name = url.rpartition("/")[2]
        with psycopg.connect(f"{self._url}/postgres", autocommit=True) as connection:
            connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = {is_so}".encode())
            if is_so:
                ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
                connection.execute(ended, [name])

    @property
    def _url(self) -> str:
        return f"postgresql://boxcal@127.0.0.1:{self.port}"

    def processes(self) -> list[psutil.Process]:
        assert self._process is not None
        if self._process.poll() is not None:
            return []
        server = psutil.Process(self._process.pid)
        return [server, *server.children(recursive=True)]
