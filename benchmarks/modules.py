"""Modules of boxcal that one real request crosses: `python -m benchmarks.modules [ROUTE ...]`.

A service runs in this process under a profiling hook; a request crosses a module if it calls one of its
functions, in whichever thread. What runs while a module is imported does not count, nor does what only some
of the repetitions call, nor the periodic work in the background: functions that an idle service calls too.
The worker process of a fit is traced by the same hook, which a `sitecustomize` module installs there, and is
listed apart.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

REPETITIONS = 3
FOLDED_SECONDS = 4.0  # in which the monitor has folded a label
IDLE_SECONDS = 12.0  # longer than the period of what the service does by itself
SITECUSTOMIZE = "from benchmarks.modules import trace_process; trace_process({path!r})"


class Trace:
    """Functions of boxcal that are called, as module and name; `found` is called with each new one."""

    def __init__(self, found: Callable[[str], object] = lambda module: None) -> None:
        self.functions: set[tuple[str, str]] = set()
        self._found = found

    def install(self) -> None:
        """Trace every thread that is started from now on."""
        threading.setprofile(self._hook)

    def _hook(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # bodies of modules, classes
            return
        spec = frame.f_globals.get("__spec__")
        called = getattr(spec, "name", ""), frame.f_code.co_qualname
        if called[0].startswith("boxcal.") and called not in self.functions and not _importing(frame):
            self.functions.add(called)
            self._found(called[0])


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "_find_and_load":
            return True
        frame = frame.f_back
    return False


def trace_process(path: str) -> None:
    """Trace all of this process, and append the module of each function to a file."""
    # Opened now: the process that reads uploads soon may open nothing.
    file = Path(path).open("a", buffering=1)  # noqa: SIM115 - until the process ends

    def found(module: str) -> None:
        file.write(f"{module}\n")

    trace = Trace(found)
    trace.install()
    sys.setprofile(trace._hook)


def crossed(routes: list[str]) -> dict[str, set[str]]:
    """Send each route's request to a real service and name the modules it crosses."""
    import httpx  # noqa: PLC0415 - nothing of this is needed in the worker
    import numpy as np  # noqa: PLC0415

    from boxcal.models.digits_data import load_digits_split  # noqa: PLC0415
    from tests.app.fitting.validation_data import validation_npz  # noqa: PLC0415
    from tests.app.running import running  # noqa: PLC0415

    requests: dict[str, dict[str, Any]] = {
        "/predict": {
            "content": load_digits_split().test.png(0),
            "headers": {"content-type": "image/png"},
        },
        "/calibrate": {"json": {"logits": np.eye(10).tolist()}},
        "/fit": {
            "files": {"file": ("v.npz", validation_npz())},
            "data": {"method": "ts", "activate": "always"},
            "params": {"wait": 300},
        },
        "/feedback": {},
    }
    modules = {}
    with tempfile.TemporaryDirectory() as folder:
        worker = Path(folder) / "worker"
        (Path(folder) / "sitecustomize.py").write_text(SITECUSTOMIZE.format(path=str(worker)))
        sys.path.insert(0, folder)
        trace = Trace()
        trace.install()
        with (
            running(Path(folder) / "data") as service,
            httpx.Client(base_url=service.url, timeout=310) as client,
        ):
            time.sleep(IDLE_SECONDS)
            trace.functions.clear()
            time.sleep(IDLE_SECONDS)
            idle = set(trace.functions)
            for route in routes:
                repeated = []
                for _ in range(REPETITIONS + 1):
                    if route == "/feedback":
                        answer = client.post("/predict?feedback=true", **requests["/predict"]).json()
                        label = {"id": answer["predictions"][0]["id"], "label": 3}
                        requests[route] = {"json": {"items": [label]}}
                        time.sleep(FOLDED_SECONDS)
                    trace.functions.clear()
                    client.post(route, **requests[route]).raise_for_status()
                    time.sleep(FOLDED_SECONDS if route == "/feedback" else 0.0)
                    repeated.append(set(trace.functions))
                modules[route] = {module for module, _ in set.intersection(*repeated[1:]) - idle}
        threading.setprofile(None)
        if worker.exists():
            modules["/fit, in the worker"] = set(worker.read_text().split())
    return modules


if __name__ == "__main__":
    for request, names in crossed(sys.argv[1:] or ["/predict", "/calibrate", "/fit", "/feedback"]).items():
        print(f"{request}: {len(names)} modules", *sorted(names), sep="\n  ")
