"""Controls the worker processes, each of which runs one task at a time.

The process starts with the first task and is kept for 60 s after each, because loading the libraries takes
longer than most tasks. A task that is cancelled or exceeds its time limit ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TypeVar

from boxcal.app.fitting.messages import (
    REPLY,
    TASK,
    Advanced,
    Checked,
    Compared,
    FitOutcome,
    Guarded,
    RefitOutcome,
    Refused,
    Reply,
    Tabled,
    Task,
)
from boxcal.app.fitting.sandbox import inherited
from boxcal.app.settings import limits

logger = logging.getLogger("boxcal")

MODULE = "boxcal.app.fitting.worker.main"
TUNABLES = "GLIBC_TUNABLES"
THREADS = max(1, (os.cpu_count() or 1) // 2)
IDLE_SECONDS = 60.0
PROTECTION = "no network, no files of the service, no new processes, no new rights"
MAX_REPLY_BYTES = 2**28


Answer = TypeVar("Answer", Checked, Tabled, FitOutcome, RefitOutcome, Compared)


class WorkerFailed(Exception):
    """The task was not completed; the message says why, for the client."""


class TaskRefused(WorkerFailed):
    """The worker could not do the task."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.detail)
        self.problem = refused.problem


class Worker:
    """Controls at most one process, on one event loop.

    `cores`: those of its process; None for those of this one, which may have only a part of the service's.
    `folder`: where all its tasks are, if it reads uploads, which it then does without any other file.
    """

    def __init__(
        self, seconds: float, cores: Collection[int] | None = None, folder: Path | None = None
    ) -> None:
        self._seconds = seconds
        self._cores = cores
        self._folder = folder
        self._missing: list[str] | None = None
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._idle: asyncio.Task[None] | None = None

    async def run(
        self,
        task: Task,
        answer: type[Answer],
        on_progress: Callable[[float, str], None] | None = None,
    ) -> Answer:
        """Run a task after those of earlier calls, and return its result.

        `on_progress`: called with the progress, 0 to 1, and the stage.
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
            except (ValueError, asyncio.LimitOverrunError) as error:
                logger.exception("A worker sent a message that cannot be read")
                raise WorkerFailed("Its process sent a message that cannot be read.") from error
            except (OSError, asyncio.IncompleteReadError) as error:
                raise WorkerFailed(describe_exit(await self.close())) from error
            finally:
                if reply is None or (isinstance(reply, Refused) and reply.trace):
                    await self.close()
            self._idle = asyncio.create_task(self._close_when_idle())
        if isinstance(reply, answer):
            return reply
        if not isinstance(reply, Refused):
            raise WorkerFailed(f"Its process answered with a message of the kind {reply.kind!r}.")
        if reply.trace:
            logger.error("The %s %s failed:\n%s", task.kind, task.folder.name, reply.trace)
        raise TaskRefused(reply)

    async def close(self) -> int | None:
        """End the process at once, and return its exit status; None if there is no process."""
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
            # In a thread, because a reply may contain megabytes of parameters.
            reply = await asyncio.to_thread(REPLY.validate_json, line)
            if isinstance(reply, Guarded):
                self._log(reply.missing)
                continue
            if not isinstance(reply, Advanced):
                return reply
            if on_progress is not None:
                on_progress(reply.progress, reply.stage)

    def _log(self, missing: list[str]) -> None:
        """Say how uploads are read, once for as long as it does not change."""
        if missing != self._missing:
            self._missing = missing
            if missing:
                logger.warning(
                    "This host allows only a part of the sandbox of uploads: %s", "; ".join(missing)
                )
            else:
                logger.info("Uploads are read in a sandbox: %s", PROTECTION)

    async def _started(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._process is not None and self._process.poll() is not None:
            await self.close()
        if self._streams is None:
            ours, theirs = socket.socketpair()
            with theirs:  # no await before the assignment: a cancellation would lose the process
                self._process = _spawn(theirs.fileno(), self._folder)
                if self._cores is not None:  # before it has imported anything that starts threads
                    os.sched_setaffinity(self._process.pid, self._cores)
            self._streams = await asyncio.open_connection(sock=ours, limit=MAX_REPLY_BYTES)
        return self._streams

    async def _close_when_idle(self) -> None:
        await asyncio.sleep(IDLE_SECONDS)
        async with self._turn:
            await self.close()


@dataclass(frozen=True, slots=True)
class Workers:
    """One process each for checks, fits and comparisons, so that none waits for another kind."""

    checks: Worker
    fits: Worker
    comparisons: Worker
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)  # Held by the fit that runs

    @classmethod
    def of(cls, uploads: Path, cores: Collection[int] | None = None) -> Self:
        """Return workers whose processes start with the first task; those that check read only `uploads`.

        They run on `cores`, or on those of this process.
        """
        return cls(
            Worker(limits.CHECK_SECONDS, cores, uploads),
            Worker(limits.FIT_SECONDS, cores),
            Worker(limits.COMPARE_SECONDS, cores),
        )


def _spawn(descriptor: int, folder: Path | None) -> subprocess.Popen[bytes]:
    """Start the process with its end of the socket; its libraries use half of the processors."""
    threads = {
        name: str(THREADS) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
    }
    # What an allocator keeps after it was freed can be used again, and the limit on what is mapped misses it.
    tunables = [one for one in os.environ.get(TUNABLES, "").split(":") if one and "_threshold=" not in one]
    allocator = {"ARROW_DEFAULT_MEMORY_POOL": "system", TUNABLES: ":".join(tunables)}
    return subprocess.Popen(  # noqa: S603 - this interpreter and a module of this package
        [sys.executable, "-P", "-m", MODULE, str(descriptor), *([str(folder)] if folder else [])],
        env=threads | inherited(os.environ) | allocator,
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def describe_exit(status: int | None) -> str:
    """Describe how a worker process ended, from its exit status in the convention of `subprocess`."""
    if status is None or status >= 0:
        return f"Its process ended with status {status} before it had a result."
    hint = "; the machine may have run out of memory" if status == -signal.SIGKILL else ""
    return f"Its process was ended by {signal.Signals(-status).name}{hint}."
