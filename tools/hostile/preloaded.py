"""A process that has loaded the libraries and forks the `boxcal` command as often as it is asked to.

A service that is killed hundreds of times starts much faster in this way. Nothing else differs: the fork
happens before any thread or connection exists.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from boxcal.app.cli.quick_start import SETTINGS, TUNABLES
from tests.app.fitting.service import Service

USED = (
    "boxcal.app.server", "boxcal.models.backends.onnx_backbone", "boxcal.calibrators.operator.cpu_loops",
    "scipy.linalg", "numba.typed", "numba.np.ufunc", "numpy.ctypeslib",
)  # fmt: skip
"""What a service imports until it is ready."""


class Forked:
    """A forked process, as far as it can be used like `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._process: psutil.Process | None = None  # it may have ended already
        with suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(pid)

    def poll(self) -> int | None:
        """Return None while it runs."""
        with suppress(psutil.NoSuchProcess):
            if self._process is not None and self._process.status() != psutil.STATUS_ZOMBIE:
                return None
        return 0

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; the status is not known."""
        if self._process is not None:
            self._process.wait(timeout)
        return 0

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self._process is not None:
            with suppress(psutil.NoSuchProcess):
                self._process.send_signal(number)


class Preloaded:
    """Runs the process; a context manager that ends it."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env={**os.environ, TUNABLES: SETTINGS},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def run(self, arguments: list[str], environment: Mapping[str, str], log: Path) -> Forked:
        """Fork `boxcal` with these arguments; both of its outputs are appended to `log`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"arguments": arguments, "environment": dict(environment), "log": str(log)}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return Forked(int(self._process.stdout.readline()))


class PreloadedService(Service):
    """A service that starts as a fork."""

    def __init__(self, preloaded: Preloaded, data_dir: Path, **settings: str) -> None:
        super().__init__(data_dir, **settings)
        self._preloaded = preloaded

    def spawn(self, *arguments: str) -> Forked:
        """Fork `boxcal` with the settings of the service."""
        return self._preloaded.run([*arguments], self.environment, self.data_dir / "service.log")

    def _spawn(self) -> Forked:
        return self.spawn("serve")


def main() -> None:
    """Fork for each line of the standard input, and answer with the process id."""
    from boxcal.app.cli import main as command

    for module in USED:
        importlib.import_module(module)

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    for line in sys.stdin:
        order = json.loads(line)
        if pid := os.fork():
            sys.stdout.write(f"{pid}\n")
            sys.stdout.flush()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(order["environment"], **{TUNABLES: SETTINGS})
        log = os.open(order["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        for descriptor, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(descriptor, target)
        sys.argv = ["boxcal", *order["arguments"]]
        status = 1
        try:
            command()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except Exception:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


if __name__ == "__main__":
    main()
