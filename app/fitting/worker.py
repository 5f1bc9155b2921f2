"""The service's handle on a worker process, which does one task at a time and is kept for the next one.

The process starts with the first task and is kept for a while after one, because loading the libraries takes
longer than most tasks. A task that is cancelled or passes its time limit ends the process with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable

from pydantic import ValidationError

from boxcal.app.fitting.messages import REPLY, TASK, Advanced, Refused, Reply, Task

logger = logging.getLogger("boxcal")

MODULE = "boxcal.app.fitting.worker_main"
THREADS = max(1, (os.cpu_count() or 1) // 2)
IDLE_SECONDS = 60.0
MAX_REPLY_BYTES = 2**28


class WorkerFailed(Exception):
    """The process ended before the task did; the message says how, for the client."""


class Worker:
    """At most one process, used on one event loop.

    Parameters
    ----------
    seconds
        Time limit of one task.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._idle: asyncio.Task[None] | None = None

    async def run(self, task: Task, on_progress: Callable[[float, str], None] | None = None) -> Reply:
        """Have a task done after those that were asked for earlier, and return its last message.

        Parameters
        ----------
        on_progress
            Called with the progress, 0 to 1, and the stage.

        Raises
        ------
        WorkerFailed
            The process died, or the task took longer than the time limit.
        """
        async with self._turn:
            if self._idle is not None:
                self._idle.cancel()
            reply = None
            try:
                async with asyncio.timeout(self._seconds):
                    reply = await self._converse(task, on_progress)
            except TimeoutError as error:
                raise WorkerFailed(
                    f"It took longer than the time limit of {self._seconds:,.0f} s."
                ) from error
            except (OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
                if isinstance(error, ValidationError):
                    logger.exception("A worker sent a message that cannot be read")
                raise WorkerFailed(describe_exit(await self.close())) from error
            finally:
                if reply is None or (isinstance(reply, Refused) and reply.trace):
                    await self.close()
            self._idle = asyncio.create_task(self._close_when_idle())
            return reply

    async def close(self) -> int | None:
        """End the process at once, and give its exit status; None where there is none."""
        if self._idle is not None and self._idle is not asyncio.current_task():
            self._idle.cancel()
        process, streams = self._process, self._streams
        self._process = self._streams = None
        if streams is not None:
            streams[1].close()
        if process is None:
            return None
        process.kill()
        return await asyncio.to_thread(process.wait)

    async def _converse(self, task: Task, on_progress: Callable[[float, str], None] | None) -> Reply:
        reader, writer = await self._started()
        writer.write(TASK.dump_json(task) + b"\n")
        await writer.drain()
        while True:
            line = await reader.readuntil()
            # A reply may hold megabytes of parameters; the event loop does not wait for them.
            reply = await asyncio.to_thread(REPLY.validate_json, line)
            if not isinstance(reply, Advanced):
                return reply
            if on_progress is not None:
                on_progress(reply.progress, reply.stage)

    async def _started(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._process is not None and self._process.poll() is not None:
            await self.close()
        if self._streams is None:
            ours, theirs = socket.socketpair()
            with theirs:  # without a pause, in which a cancellation would lose the process
                self._process = _spawn(theirs.fileno())
            self._streams = await asyncio.open_connection(sock=ours, limit=MAX_REPLY_BYTES)
        return self._streams

    async def _close_when_idle(self) -> None:
        await asyncio.sleep(IDLE_SECONDS)
        async with self._turn:
            await self.close()


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    """Start the process with its end of the socket; it leaves half of the processors to predictions."""
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


def describe_exit(status: int | None) -> str:
    """Say how a worker process ended, by its exit status as `subprocess` gives it."""
    if status is None or status >= 0:
        return f"Its process ended with status {status} before it had a result."
    hint = "; the machine may have run out of memory" if status == -signal.SIGKILL else ""
    return f"Its process was ended by {signal.Signals(-status).name}{hint}."
