"""`BOXCAL_WORKERS`: starts the serving processes, restarts those that die, replaces all of them on SIGHUP.

The supervisor opens the socket, so that connections which no process has accepted yet belong to none of them:
whichever serves next takes them.
"""

from __future__ import annotations

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
from dataclasses import dataclass, field
from logging.config import dictConfig
from pathlib import Path

from pydantic import SecretStr

from boxcal.app.observability.logs import log_config
from boxcal.app.settings.service import Settings
from boxcal.app.workers.metrics import join_ended

logger = logging.getLogger("boxcal")

BACKLOG = 2048
TICK_SECONDS = 0.05
EXTRA_SECONDS = 5.0
"""Beyond the time to finish requests, after which a process is killed."""
SHORTEST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
STEADY_SECONDS = 60.0
"""A process that served for so long restarts without a pause."""


@dataclass(eq=False)
class Process:
    """One serving process."""

    popen: subprocess.Popen[bytes]
    ready: int
    began: float
    is_ready: bool = False
    killed_at: float | None = None

    def look(self) -> bool:
        """Whether the process has become ready since it was last asked, or was before."""
        if not self.is_ready:
            try:
                self.is_ready = os.read(self.ready, 1) == b"1"
            except BlockingIOError:
                return False
        return self.is_ready

    def is_dead(self) -> bool:
        """Whether it has ended."""
        return self.popen.poll() is not None

    def retire(self, seconds: float) -> None:
        """Let it finish its requests, for at most so long."""
        self.popen.terminate()
        self.killed_at = time.monotonic() + seconds


@dataclass(eq=False)
class Place:
    """A slot: the process that serves in it, and the one that is to replace it."""

    index: int
    current: Process | None = None
    coming: Process | None = None
    pause: float = 0.0
    start_at: float = 0.0


@dataclass(eq=False)
class Supervisor:
    """Keeps one process in each slot.

    Parameters
    ----------
    count
        Number of slots.
    spawn
        Starts a process for a slot.
    seconds
        For a process to end after SIGTERM.

    Attributes
    ----------
    stop_asked, roll_asked
        Set by signals: end; replace every process, one after the other, each once its successor serves.
    status
        Exit status, once everything has ended.
    """

    count: int
    spawn: Callable[[int], Process]
    seconds: float
    stop_asked: bool = False
    roll_asked: bool = False
    status: int = 0
    is_stopping: bool = False
    _places: list[Place] = field(init=False)
    _retiring: list[Process] = field(default_factory=list)
    _rolling: deque[Place] = field(default_factory=deque)
    _has_served: bool = False

    def __post_init__(self) -> None:
        self._places = [Place(index) for index in range(self.count)]

    def _stop(self) -> None:
        """Let every process finish its requests."""
        self.is_stopping = True
        for place in self._places:
            for process in (place.current, place.coming):
                if process is not None:
                    process.retire(self.seconds)
                    self._retiring.append(process)
            place.current = place.coming = None

    def tick(self) -> bool:
        """Do what is due; returns False once everything has ended."""
        self._reap()
        if self.stop_asked and not self.is_stopping:
            self._stop()
        if self.is_stopping:
            return bool(self._retiring)
        if self.roll_asked:
            self.roll_asked, self._rolling = False, deque(self._places)
        for place in self._places:
            if place.coming is not None:
                self._replace(place, place.coming)
            elif place.current is None:
                # The first process migrates the registry, so the others wait for it.
                if (self._has_served or place.index == 0) and time.monotonic() >= place.start_at:
                    place.current = self.spawn(place.index)
            elif place.current.is_dead():
                self._restart(place, place.current)
            elif place.current.look():
                self._has_served = True
        if self._rolling and all(place.coming is None for place in self._places):
            place = self._rolling.popleft()
            place.coming = self.spawn(place.index)
        return True

    def _replace(self, place: Place, coming: Process) -> None:
        if coming.is_dead():
            logger.error("The new process %d ended before it was ready; the old ones stay.", place.index)
            place.coming = None
            self._rolling.clear()
        elif coming.look():
            if place.current is not None:
                place.current.retire(self.seconds)
                self._retiring.append(place.current)
            place.current, place.coming = coming, None
            logger.info("Process %d was replaced by %d.", place.index, coming.popen.pid)

    def _restart(self, place: Place, dead: Process) -> None:
        status = dead.popen.returncode
        if not self._has_served:
            self.status = status if status > 0 else 1
            self._stop()
            return
        served = time.monotonic() - dead.began
        place.pause = (
            0.0 if served > STEADY_SECONDS else min(LONGEST_PAUSE, max(SHORTEST_PAUSE, 2 * place.pause))
        )
        logger.error("Process %d ended with status %d; it starts again.", place.index, status)
        place.current, place.start_at = None, time.monotonic() + place.pause

    def _reap(self) -> None:
        for process in list(self._retiring):
            if process.is_dead():
                self._retiring.remove(process)
            elif process.killed_at is not None and time.monotonic() > process.killed_at:
                process.popen.kill()


def listener(settings: Settings) -> socket.socket:
    """Open the socket that all processes accept from."""
    if settings.uds is not None:
        opened = socket.socket(socket.AF_UNIX)
        settings.uds.unlink(missing_ok=True)
        opened.bind(str(settings.uds))
        settings.uds.chmod(0o666)
    else:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        opened = socket.socket(family)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((settings.host, settings.port))
    opened.listen(BACKLOG)
    return opened


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
    """Serve with several processes until SIGTERM or SIGINT.

    Raises
    ------
    SystemExit
        With the status of the first process, if it could not start.
    """
    dictConfig(log_config(settings))
    folder = Path(tempfile.mkdtemp(prefix="boxcal-workers-"))
    opened = listener(settings)
    lifeline, held = os.pipe()
    child_environment = environment(settings)

    def spawn(index: int) -> Process:
        join_ended(folder)
        ready, told = os.pipe()
        os.set_blocking(ready, False)
        descriptors = (opened.fileno(), told, lifeline)
        arguments = [*map(str, (index, settings.workers, *descriptors)), str(folder)]
        popen = subprocess.Popen(  # noqa: S603 - this very program
            [sys.executable, "-m", "boxcal.app.workers.process", *arguments],
            env=child_environment,
            pass_fds=descriptors,
            process_group=0,  # so that Ctrl-C reaches the supervisor alone
        )
        os.close(told)
        return Process(popen, ready, time.monotonic())

    supervisor = Supervisor(settings.workers, spawn, settings.shutdown_seconds + EXTRA_SECONDS)
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda *_: setattr(supervisor, "stop_asked", True))
    signal.signal(signal.SIGHUP, lambda *_: setattr(supervisor, "roll_asked", True))
    logger.info("%d processes serve %s", settings.workers, opened.getsockname())
    try:
        while supervisor.tick():
            time.sleep(TICK_SECONDS)
    finally:
        os.close(held)
        shutil.rmtree(folder, ignore_errors=True)
        if settings.uds is not None:
            settings.uds.unlink(missing_ok=True)
    if supervisor.status:
        sys.exit(supervisor.status)
