"""What the check of an API key costs a small request: `python -m benchmarks.key_cost [ROUNDS [FOLDER]]`.

A request to `/calibrate` contains one row of 1000 logits in JSON, the response all probabilities; 8
connections are busy. The services run at the same time, and take turns under load. FOLDER is another checkout
of the project, to compare with.
"""

from __future__ import annotations

import base64
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.serving.payloads import for_boxcal, free_port, random_logits
from benchmarks.serving.running import run_part
from boxcal.app.access.scopes import Scope
from boxcal.app.access.store import KeyStore
from boxcal.app.registry.audit import Caller

CONNECTIONS = 8
SECONDS = 1.5
HERE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Side:
    """One service, and the requests for it."""

    port: int
    process: psutil.Process
    requests: list[str]

    def microseconds(self) -> float:
        """Put it under load; CPU time for each request."""
        phase = {"name": "load", "seconds": SECONDS, "connections": CONNECTIONS}
        used = self.process.cpu_times()
        (full,) = run_part("load", plan={"port": self.port, "requests": self.requests, "phases": [phase]})
        spent = self.process.cpu_times()
        if full["failures"]:
            raise SystemExit(f"requests failed: {full['failures']}")
        seconds = spent.user + spent.system - used.user - used.system
        return float(seconds / len(full["latencies"]) * 1e6)


@contextmanager
def serving(folder: Path, bodies: list[bytes], *, with_key: bool) -> Iterator[Side]:
    """Run the service of a checkout."""
    port = free_port()
    with tempfile.TemporaryDirectory() as data:
        key = ""
        if with_key:
            store = KeyStore.at(f"sqlite:///{data}/boxcal.sqlite3")
            key = store.create("load", {Scope.PREDICT}, Caller("benchmark"))[1]
            store.close()
        settings = {"BOXCAL_PORT": str(port), "BOXCAL_DATA_DIR": data, "BOXCAL_MODEL": "logits:1000"}
        environment = os.environ | settings | {"PYTHONPATH": str(folder)}
        command = [sys.executable, "-c", "from boxcal.app.cli import main; main()", "serve"]
        process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, cwd=folder)
        try:
            wait_until_ready(process, port)
            requests = [for_boxcal("logits", body).encoded(port) for body in bodies]
            if with_key:
                header = f"X-API-Key: {key}\r\n\r\n".encode()
                requests = [request.replace(b"\r\n\r\n", b"\r\n" + header, 1) for request in requests]
            encoded = [base64.b64encode(request).decode() for request in requests]
            yield Side(port, psutil.Process(process.pid), encoded)
        finally:
            process.terminate()
            process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Return when the service is ready."""
    while True:
        if process.poll() is not None:
            raise SystemExit("a service did not start")
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready", timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return


def main(rounds: int, other: Path | None) -> None:
    """Measure in turns; print medians, and the medians of the ratios within a round."""
    bodies = random_logits(64)
    with ExitStack() as stack:
        sides = {
            "without keys": stack.enter_context(serving(HERE, bodies, with_key=False)),
            "with a key": stack.enter_context(serving(HERE, bodies, with_key=True)),
        }
        if other is not None:
            sides[str(other)] = stack.enter_context(serving(other, bodies, with_key=False))
        for side in sides.values():
            side.microseconds()
        found: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds):
            for name in sorted(sides, reverse=number % 2 == 1):
                found[name].append(sides[name].microseconds())
    plain = found["without keys"]
    for name, values in found.items():
        ratio = statistics.median(value / base for value, base in zip(values, plain, strict=True))
        print(f"{name}: {statistics.median(values):.1f} µs of processor, {100 * (ratio - 1):+.1f} %")


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 10,
        Path(sys.argv[2]).resolve() if len(sys.argv) > 2 else None,
    )
