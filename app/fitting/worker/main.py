"""The worker process: checks uploads and runs fits, one task at a time, apart from the service.

Tasks arrive and messages leave on one socket. The process yields the processor to predictions, is the first
that the kernel ends when memory runs out, and ends when the service does, even in the middle of a fit.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO

from boxcal.app.fitting.messages import (
    REPLY,
    TASK,
    Advanced,
    CheckTask,
    CompareTask,
    Guarded,
    RefitTask,
    Refused,
    Reply,
    TableTask,
    Task,
)
from boxcal.app.fitting.resources import full_disk_as_problem
from boxcal.app.fitting.sandbox import enter_sandbox
from boxcal.app.http.problems import (
    BoxcalError,
    InternalError,
    InvalidUpload,
)

NICENESS = 10
OOM_SCORE = 900  # of 1000: the kernel ends this process before the service
REPORT_SECONDS = 0.05
COMPILING = "compiling loops for this processor, once"


def main(descriptor: int, folder: Path | None = None) -> None:
    """Do tasks until the service closes the socket with this file descriptor; `folder` as `enter_sandbox`."""
    # An interrupt from the keyboard is for the service, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))
    missing = enter_sandbox(folder)
    line = socket.socket(fileno=descriptor)
    replies = line.makefile("wb")
    if folder is not None:
        _send(replies, Guarded(missing))
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    gc.disable()  # until the first task has its libraries: imports leave no garbage
    threading.Thread(target=_listen, args=(line.makefile("rb"), tasks), daemon=True).start()
    while True:
        _send(replies, _result(tasks.get(), _Reporter(replies)))


def _listen(lines: BinaryIO, tasks: queue.SimpleQueue[Task]) -> None:
    """Pass tasks on, and end the process when the service is gone."""
    with suppress(ConnectionResetError):  # so it fails where the service has left a message unread
        for line in lines:
            tasks.put(TASK.validate_json(line))
    os._exit(0)


def _send(replies: BinaryIO, reply: Reply) -> None:
    replies.write(REPLY.dump_json(reply) + b"\n")
    replies.flush()


def _result(task: Task, progress: _Reporter) -> Reply:
    """Do a task; whatever goes wrong in it becomes a message."""
    notices = logging.getLogger("boxcal.compiling")
    notices.handlers, notices.propagate = [_Notices(progress)], False
    try:
        with full_disk_as_problem():
            work = _loaded(task, progress)
            if not gc.isenabled():
                gc.freeze()  # the libraries stay for as long as the process
                gc.enable()
            return work()
    except Exception as error:
        return _refused(task, error)


def _loaded(task: Task, progress: _Reporter) -> Callable[[], Reply]:
    """Import what does a task; not before, so that the end of the service is noticed while libraries load."""
    if isinstance(task, CheckTask):
        from boxcal.app.fitting.worker.check import check  # noqa: PLC0415

        return partial(check, task)
    if isinstance(task, TableTask):
        from boxcal.app.fitting.worker.label_table import read_labels  # noqa: PLC0415

        return partial(read_labels, task)
    if isinstance(task, RefitTask):
        from boxcal.app.fitting.worker.refit import refit  # noqa: PLC0415

        return partial(refit, task)
    if isinstance(task, CompareTask):
        from boxcal.app.fitting.worker.compare import compare  # noqa: PLC0415

        return partial(compare, task, progress)
    from boxcal.app.fitting.worker.fit import perform  # noqa: PLC0415

    return partial(perform, task, progress)


def _refused(task: Task, error: Exception) -> Refused:
    if isinstance(error, BoxcalError):
        return Refused(error.type, error.detail)
    trace = "".join(traceback.format_exception(error, limit=-8))
    is_read = isinstance(task, CheckTask | TableTask)
    if _is_out_of_memory(error):
        limit = f"{task.memory_bytes:,} bytes" if task.memory_bytes else "this machine"
        done = "read" if is_read else {"comparison": "compared on"}.get(task.kind, "fitted")
        detail = f"The file could not be {done} within the memory limit of {limit}."
        return Refused(InvalidUpload.default.type, detail, trace)
    if is_read:
        detail = f"The file cannot be read: {type(error).__name__}: {error}"[:1000]
        return Refused(InvalidUpload.default.type, detail, trace)
    if isinstance(error, ValueError):
        return Refused(InvalidUpload.default.type, str(error))
    return Refused(InternalError.type, f"{type(error).__name__}: {error}", trace)


def _is_out_of_memory(error: Exception) -> bool:
    # torch raises a RuntimeError where its allocator fails.
    return isinstance(error, MemoryError) or "allocate memory" in str(error) or "bad_alloc" in str(error)


class _Reporter:
    """Sends progress, at most every `REPORT_SECONDS` within one stage."""

    def __init__(self, replies: BinaryIO) -> None:
        self._replies = replies
        self._last = self._fraction = 0.0
        self._stage = ""

    def __call__(self, fraction: float, stage: str) -> None:
        now = time.monotonic()
        if stage == self._stage and now - self._last < REPORT_SECONDS:
            return
        self._last, self._stage, self._fraction = now, stage, min(1.0, max(0.0, fraction))
        _send(self._replies, Advanced(self._fraction, stage))

    def waits(self, stage: str) -> None:
        """Report a stage in which the task does not advance."""
        self(self._fraction, stage)


class _Notices(logging.Handler):
    """Turns the notice that loops are compiled into a stage of the fit that waits for it."""

    def __init__(self, progress: _Reporter) -> None:
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.waits(COMPILING)


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(Path, sys.argv[2:]))
