"""Starts the serving processes of `BOXCAL_WORKERS`, and replaces those that end or hang.

The supervisor opens the listening socket, so that connections which no process has accepted yet belong to
none of them: whichever serves next accepts them.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from logging.config import dictConfig
from pathlib import Path

from pydantic import SecretStr

from boxcal.app.observability.logs import log_config
from boxcal.app.settings import limits
from boxcal.app.settings.service import Settings
from boxcal.app.workers.metrics import keep_counts
from boxcal.app.workers.table import ProcessTable

logger = logging.getLogger("boxcal")

BACKLOG = 2048
TICK_SECONDS = 0.05
HANG_TICKS = 120
"""An event loop that does not run for so many ticks of the supervisor (6 s) hangs.

Ticks are counted, and not time: after a pause of the whole machine every heartbeat is old.
"""
EXTRA_SECONDS = 5.0
"""Beyond the time to finish requests, after which a process is killed."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
STEADY_SECONDS = 60.0
"""A process that served for so long restarts without a pause."""


@dataclass(eq=False)
class Process:
    """One serving process."""

    popen: subprocess.Popen[bytes]
    row: int  # In the table of processes
    began: float
    heartbeat: float = 0.0  # The last one; 0 until the process serves
    silent_ticks: int = 0  # Since its heartbeat changed
    kill_at: float = 0.0

    def watch(self, heartbeat: float) -> None:
        """Note the heartbeat at this tick."""
        self.silent_ticks = 0 if heartbeat != self.heartbeat else self.silent_ticks + 1
        self.heartbeat = heartbeat

    @property
    def is_ready(self) -> bool:
        return self.heartbeat > 0

    @property
    def is_dead(self) -> bool:
        return self.popen.poll() is not None


@dataclass(eq=False)
class SlotProcesses:
    """A slot: the process that serves in it, and the one that is to replace it."""

    index: int
    current: Process | None = None
    successor: Process | None = None
    pause: float = 0.0
    start_at: float = 0.0


class Supervisor:
    """Keeps one process in each slot."""

    def __init__(
        self, count: int, spawn: Callable[[int, int], Process], folder: Path, seconds: float
    ) -> None:
        self.must_stop = self.must_replace = self.is_stopping = False
        self.status = 0
        self._spawn, self._folder, self._seconds = spawn, folder, seconds
        self._table = ProcessTable(folder, count)
        self._places = [SlotProcesses(index) for index in range(count)]
        self._retired: list[Process] = []
        self._to_replace: deque[SlotProcesses] = deque()
        self._has_served = False

    def tick(self) -> bool:
        """Do what is due; returns False once everything has ended."""
        for process in list(self._retired):
            if process.is_dead:
                self._retired.remove(process)
                keep_counts(self._folder, process.popen.pid)
            elif time.monotonic() > process.kill_at:
                process.popen.kill()
        if self.must_stop and not self.is_stopping:
            self._stop()
        if self.is_stopping:
            return bool(self._retired)
        if self.must_replace:
            self.must_replace, self._to_replace = False, deque(self._places)
        for place in self._places:
            self._check(place)
        if self._to_replace and all(place.successor is None for place in self._places):
            place = self._to_replace.popleft()
            if place.current is not None:
                place.successor = self._start(place)
        return True

    def _start(self, place: SlotProcesses) -> Process:
        is_taken = place.current is not None and place.current.row == place.index
        row = place.index + (len(self._places) if is_taken else 0)
        self._table.clear(row)
        return self._spawn(place.index, row)

    def _check(self, place: SlotProcesses) -> None:
        for process in (place.current, place.successor):
            if process is not None:
                process.watch(self._table.heartbeat(process.row, process.popen.pid))
        if place.current is None and place.successor is None:
            # The first process migrates the registry, so the others wait for it.
            if (self._has_served or place.index == 0) and time.monotonic() >= place.start_at:
                place.current = self._start(place)
        elif place.current is not None and place.current.is_dead:
            self._restart(place, place.current)
        elif place.current is not None and place.current.is_ready:
            self._has_served = True
            if place.current.silent_ticks >= HANG_TICKS:
                seconds = HANG_TICKS * TICK_SECONDS
                logger.error("The event loop of process %d hangs for %.0f s; killed.", place.index, seconds)
                place.current.popen.kill()
                place.current.popen.wait()
        if place.successor is not None:
            self._replace(place, place.successor)

    def _replace(self, place: SlotProcesses, successor: Process) -> None:
        if successor.is_dead:
            logger.error("The new process %d ended before it was ready; the old ones stay.", place.index)
            place.successor = None
            self._to_replace.clear()
        elif successor.is_ready:
            if place.current is not None:
                self._retire(place.current)
            place.current, place.successor = successor, None
            logger.info("Process %d was replaced by %d.", place.index, successor.popen.pid)

    def _restart(self, place: SlotProcesses, dead: Process) -> None:
        status = dead.popen.returncode
        if not self._has_served:
            self.status = status if status > 0 else 1
            self._stop()
            return
        served = time.monotonic() - dead.began
        is_steady = served > STEADY_SECONDS
        place.pause = 0.0 if is_steady else min(LONGEST_PAUSE, max(SHORTEST_PAUSE, 2 * place.pause))
        logger.error("Process %d ended with status %d; it starts again.", place.index, status)
        self._table.clear(dead.row)
        keep_counts(self._folder, dead.popen.pid, restarts=1)
        place.current, place.start_at = None, time.monotonic() + place.pause

    def _retire(self, process: Process) -> None:
        """Let a process finish its requests; one that does not serve yet has none."""
        if process.is_ready:
            process.popen.terminate()
        else:
            process.popen.kill()
        process.kill_at = time.monotonic() + self._seconds
        self._retired.append(process)

    def _stop(self) -> None:
        self.is_stopping = True
        for place in self._places:
            for process in (place.current, place.successor):
                if process is not None:
                    self._retire(process)
            place.current = place.successor = None


def open_listener(settings: Settings) -> socket.socket:
    """Open the socket that all processes accept from."""
    if settings.uds is not None:
        if settings.uds.is_socket():
            settings.uds.unlink(missing_ok=True)
        elif settings.uds.exists():
            reason = "is no socket; move it away, or name another path in BOXCAL_HOST"
            raise FileExistsError(errno.EEXIST, reason, str(settings.uds))
        opened = socket.socket(socket.AF_UNIX)
        opened.bind(str(settings.uds))
        settings.uds.chmod(0o666)
    else:
        opened = settings.listen(settings.port)
    opened.listen(BACKLOG)
    return opened


def identity(path: Path) -> tuple[int, int, int]:
    """Tell a socket from the one of a successor; the time is needed, as numbers of files are used again."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_ctime_ns


def remove(path: Path, own: tuple[int, int, int] | None) -> None:
    """Remove a socket, unless a successor has put its own there."""
    with suppress(FileNotFoundError):
        if identity(path) == own:
            path.unlink()


def environment(settings: Settings) -> dict[str, str]:
    """Return the environment of a process: ours, with the settings that came as options."""
    values = {name: getattr(settings, name) for name in settings.model_fields_set}
    given = {
        f"BOXCAL_{name.upper()}": value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        for name, value in values.items()
        if value is not None
    }
    return {**os.environ, **given}


def supervise(settings: Settings) -> None:
    """Serve with several processes until SIGTERM or SIGINT."""
    dictConfig(log_config(settings))
    listener = open_listener(settings)
    folder = Path(tempfile.mkdtemp(prefix="boxcal-workers-"))
    own = None if settings.uds is None else identity(settings.uds)
    child_environment = environment(settings)

    def spawn(index: int, row: int) -> Process:
        numbers = (index, settings.workers, row, listener.fileno(), os.getpid())
        popen = subprocess.Popen(  # noqa: S603 - this very program
            [sys.executable, "-m", "boxcal.app.workers.process", *map(str, numbers), str(folder)],
            env=child_environment,
            pass_fds=[listener.fileno()],
            process_group=0,  # so that Ctrl-C reaches the supervisor alone
        )
        return Process(popen, row, time.monotonic())

    supervisor = Supervisor(settings.workers, spawn, folder, limits.SHUTDOWN_SECONDS + EXTRA_SECONDS)
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda *_: setattr(supervisor, "must_stop", True))
    signal.signal(signal.SIGHUP, lambda *_: setattr(supervisor, "must_replace", True))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    logger.info("%d processes serve %s", settings.workers, listener.getsockname())
    try:
        while supervisor.tick():
            if supervisor.is_stopping:
                listener.close()  # the processes accept what has arrived; then connections are refused
            time.sleep(TICK_SECONDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if settings.uds is not None:
            remove(settings.uds, own)
    if supervisor.status:
        sys.exit(supervisor.status)
