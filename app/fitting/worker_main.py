"""The process in which fits run: tasks come in over one line, progress and results go out over it.

It yields the processor to predictions, and ends with the service however that ends: the line then breaks,
which a thread of its own notices even in the middle of a fit.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from multiprocessing.connection import Connection

from boxcal.app.fitting.messages import Advanced, FitTask, Refused

NICENESS = 10
REPORT_SECONDS = 0.05


def main(descriptor: int) -> None:
    """Do fits until the line breaks.

    Parameters
    ----------
    descriptor
        File descriptor of the line to the service.
    """
    # An interrupt from the keyboard is for the service, which then ends this process in good order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICENESS)
    connection = Connection(descriptor)
    tasks: queue.SimpleQueue[FitTask] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(connection, tasks), daemon=True).start()
    while True:
        _work(connection, tasks.get())


def _listen(connection: Connection, tasks: queue.SimpleQueue[FitTask]) -> None:
    """Pass tasks on, and end the process when the service is gone."""
    while True:
        try:
            tasks.put(connection.recv())
        except (EOFError, OSError):
            os._exit(0)


def _work(connection: Connection, task: FitTask) -> None:
    """Do one fit; everything there is to say about it goes out over the line."""
    try:
        from boxcal.app.fitting.fit import perform  # noqa: PLC0415 - the line must be watched while this loads

        connection.send(perform(task, _Reporter(connection)))
    except ValueError as error:
        connection.send(Refused(str(error)))
    except MemoryError:
        connection.send(Refused("The fit ran out of memory."))
    except Exception as error:
        connection.send(Refused(f"{type(error).__name__}: {error}", traceback.format_exc()))


class _Reporter:
    """Sends progress, but not more often than anyone could read it; a new stage is always told."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._last = 0.0
        self._stage = ""

    def __call__(self, fraction: float, stage: str) -> None:
        now = time.monotonic()
        if stage == self._stage and now - self._last < REPORT_SECONDS:
            return
        self._last, self._stage = now, stage
        self._connection.send(Advanced(min(1.0, max(0.0, fraction)), stage))


if __name__ == "__main__":
    main(int(sys.argv[1]))
