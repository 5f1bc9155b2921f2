"""The process in which a fit runs, and the handle that the service has on it.

Processes are forked from a server that has loaded everything a fit needs and nothing else. It starts with the
first fit, so a service that never fits pays nothing, and a second fit starts in milliseconds. A worker speaks
over one pipe, yields the processor to predictions, and ends with the service however that ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from app.refit.fitting import FitOutcome, FitTask

logger = logging.getLogger("boxcal")

NICENESS = 10
REPORT_SECONDS = 0.05
GRACE_SECONDS = 2.0


class FitFailed(Exception):
    """A fit that came to no calibrator; the message is for the client."""


@dataclass(frozen=True, slots=True)
class Advanced:
    """The fit is `progress` (0 to 1) through, and doing what `stage` says."""

    progress: float
    stage: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The fit ended with an error; `trace` is for the log, and empty where the data are at fault."""

    reason: str
    trace: str


class FitProcess:
    """One fit in a process of its own.

    Parameters
    ----------
    task
        What to do.
    on_progress
        Called with each progress message in the thread of `run`.
    """

    def __init__(self, task: FitTask, on_progress: Callable[[float, str], None]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["app.refit.fitting"])
        self._receiver, self._sender = context.Pipe(duplex=False)
        self._process = context.Process(
            target=_main, args=(task, self._sender), name="boxcal-fit", daemon=True
        )
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._running = False
        self._killed = False

    def run(self) -> FitOutcome:
        """Start the process, and block until it is over.

        Raises
        ------
        FitFailed
            It refused the data, met an error, was killed or died.
        """
        try:
            with self._lock:
                if self._killed:
                    raise FitFailed("The fit was stopped before it started.")
                self._process.start()
                self._running = True
            self._sender.close()
            return self._listen()
        finally:
            self._receiver.close()
            self._bury()

    def kill(self) -> None:
        """End the process at once, from any thread; `run` then raises."""
        with self._lock:
            self._killed = True
            if self._running:
                self._process.kill()

    def _bury(self) -> None:
        if not self._running:
            return
        self._process.join(GRACE_SECONDS)
        with self._lock:
            self._process.kill()
            self._running = False
        self._process.join()
        self._process.close()

    def _listen(self) -> FitOutcome:
        while True:
            try:
                message: Any = self._receiver.recv()
            except (EOFError, OSError):
                self._process.join()
                raise FitFailed(_obituary(self._process.exitcode)) from None
            if isinstance(message, Advanced):
                self._on_progress(message.progress, message.stage)
            elif isinstance(message, Refused):
                if message.trace:
                    logger.error("A fit failed:\n%s", message.trace)
                raise FitFailed(message.reason)
            else:
                outcome: FitOutcome = message
                return outcome


def _obituary(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = "; the machine may have run out of memory" if -exitcode == signal.SIGKILL else ""
        return f"The fit's process was ended by {name}{hint}."
    return f"The fit's process ended with status {exitcode} before it had a result."


def _main(task: FitTask, sender: Connection) -> None:
    """Run one fit; everything it has to say goes into the pipe."""
    import torch  # noqa: PLC0415 - loaded already by the fork server, and not needed by the service's side

    from app.refit.fitting import perform  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    os.nice(NICENESS)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // 2))
    try:
        sender.send(perform(task, _Reporter(sender)))
    except ValueError as error:
        sender.send(Refused(str(error), ""))
    except MemoryError:
        sender.send(Refused("The fit ran out of memory.", ""))
    except Exception as error:
        import traceback  # noqa: PLC0415

        sender.send(Refused(f"{type(error).__name__}: {error}", traceback.format_exc()))


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


class _Reporter:
    """Sends progress, but not more often than anyone could read it; a new stage is always told."""

    def __init__(self, sender: Connection) -> None:
        self._sender = sender
        self._last = 0.0
        self._stage = ""

    def __call__(self, fraction: float, stage: str) -> None:
        now = time.monotonic()
        if stage == self._stage and now - self._last < REPORT_SECONDS:
            return
        self._last, self._stage = now, stage
        self._sender.send(Advanced(min(1.0, max(0.0, fraction)), stage))
