"""The service's handle on the process in which fits run, one after the other.

The process starts with the first fit, so a service that never fits pays nothing, and is kept for a while
after one, because loading the libraries takes longer than most fits. A fit that is cancelled or crashes takes
the process with it, and the next one starts another.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from boxcal.app.fitting.messages import Advanced, FitOutcome, FitTask, Refused

logger = logging.getLogger("boxcal")

MODULE = "boxcal.app.fitting.worker_main"
THREADS = max(1, (os.cpu_count() or 1) // 2)


class FitFailed(Exception):
    """A fit that came to no calibrator; the message is for the client."""


class Worker:
    """At most one process, which does one fit at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(self, task: FitTask, on_progress: Callable[[float, str], None]) -> FitOutcome:
        """Have a fit done, and block until it is over.

        Parameters
        ----------
        on_progress
            Called in this thread with the progress, 0 to 1, and the stage.

        Raises
        ------
        FitFailed
            It refused the data, met an error, was stopped or died.
        """
        connection = self._started()
        try:
            connection.send(task)
            while isinstance(message := connection.recv(), Advanced):
                on_progress(message.progress, message.stage)
        except (EOFError, OSError) as error:
            raise FitFailed(_describe_exit(self.close())) from error
        if isinstance(message, Refused):
            if message.trace:
                logger.error("A fit failed:\n%s", message.trace)
            raise FitFailed(message.reason)
        outcome: FitOutcome = message
        return outcome

    def stop(self) -> None:
        """End the process at once, whatever it is doing, from any thread; a `run` under way then raises."""
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def close(self) -> int | None:
        """End the process while no `run` is under way, and give its exit status; None where there is none."""
        with self._lock:
            return self._reap()

    def _started(self) -> Connection:
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._reap()
            if self._connection is None:
                ours, theirs = socket.socketpair()
                with theirs:
                    self._process = _spawn(theirs.fileno())
                self._connection = Connection(ours.detach())
            return self._connection

    def _reap(self) -> int | None:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if process is None or connection is None:
            return None
        connection.close()
        process.kill()
        return process.wait()


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    """Start the process with its end of the line; it leaves half of the processors to predictions."""
    threads = {
        name: str(THREADS) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    }
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.Popen(  # noqa: S603 - this interpreter, and a module of our own
        [sys.executable, "-P", "-m", MODULE, str(descriptor)],
        env=threads | os.environ | {"PYTHONPATH": path},
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def _describe_exit(status: int | None) -> str:
    if status is None:
        return "The fit was stopped."
    if status < 0:
        hint = "; the machine may have run out of memory" if status == -signal.SIGKILL else ""
        return f"The fit's process was ended by {signal.Signals(-status).name}{hint}."
    return f"The fit's process ended with status {status} before it had a result."
