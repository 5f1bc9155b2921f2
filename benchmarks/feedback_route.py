"""What feedback costs: `python -m benchmarks.feedback_route [--before CHECKOUT] [--pairs N]`.

For K = 10 and 100, and for requests of 1 and of 64 rows, it serves `BOXCAL_MODEL=logits:K` and sends
`/calibrate` by turns without and with the option `feedback`, some seconds each. Counted is the processor time
a request of the whole process, the threads that store and fold included until nothing is left to do. Such
pairs are robust where other programs run. With another checkout, from before there was feedback, a second
service is compared with the one without the option. The last part sends the labels of 5,000 predictions in
batches of 100.
"""

from __future__ import annotations

import base64
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil

from benchmarks.overload import wait_until_ready
from benchmarks.serving.payloads import Request, free_port
from benchmarks.serving.running import run_part

CONNECTIONS = 8
SECONDS = 2.0
SETTLE_SECONDS = 3.5
"""Until what was predicted is stored and folded."""
PREDICTIONS, BATCH = 5000, 100
HERE = Path(__file__).parents[1]
SERVE = "from boxcal.app.cli import main; main()"


@contextmanager
def serving(checkout: Path, classes: int) -> Iterator[tuple[int, psutil.Process]]:
    """Run the service of a checkout; gives its port and its process."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "PYTHONPATH": str(checkout),
            "BOXCAL_PORT": str(port),
            "BOXCAL_DATA_DIR": folder,
            "BOXCAL_MODEL": f"logits:{classes}",
        }
        command = [sys.executable, "-c", SERVE, "serve"]
        process = subprocess.Popen(
            command, env=os.environ | settings, stderr=subprocess.DEVNULL, cwd=checkout
        )
        try:
            wait_until_ready(process, port)
            yield port, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


@dataclass(frozen=True)
class Side:
    """One of the sides that are compared: a service, and the requests that it gets."""

    port: int
    process: psutil.Process
    requests: list[str]

    @classmethod
    def of(cls, port: int, process: psutil.Process, classes: int, rows: int, *, feedback: bool) -> Side:
        """Make requests of some rows."""
        options = {"top_k": 1, **({"feedback": True} if feedback else {})}
        logits = np.random.default_rng(0).normal(0, 3, (16, rows, classes)).round(4)
        bodies = [json.dumps({"logits": some.tolist(), "options": options}).encode() for some in logits]
        requests = [Request("/calibrate", "application/json", body).encoded(port) for body in bodies]
        return cls(port, process, [base64.b64encode(request).decode() for request in requests])

    def cost(self) -> float:
        """Return processor time in µs a request."""
        phase = {"name": "full", "seconds": SECONDS, "connections": CONNECTIONS}
        plan = {"port": self.port, "requests": self.requests, "phases": [phase]}
        used = self.process.cpu_times()
        (answered,) = run_part("load", plan=plan)
        time.sleep(SETTLE_SECONDS)
        spent = self.process.cpu_times()
        if answered["failures"]:
            raise SystemExit(f"requests failed: {answered['failures']}")
        return (spent.user + spent.system - used.user - used.system) / len(answered["latencies"]) * 1e6


def compare(sides: Mapping[str, Side], pairs: int) -> None:
    """Measure the sides by turns, and print the medians, and the median of the ratios with its quartiles."""
    for side in sides.values():
        side.cost()  # loads the compiled loops
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(pairs):
        for name, side in sorted(sides.items(), reverse=bool(number % 2)):
            found[name].append(side.cost())
    for name, base in (("without", "before"), ("with", "without")):
        if base in found:
            ratios = [one / other for one, other in zip(found[name], found[base], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            costs = f"{statistics.median(found[name]):.0f} / {statistics.median(found[base]):.0f} µs"
            print(f"  {name} / {base}: {costs}, ratio {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)


def labels_per_second(classes: int) -> tuple[float, float]:
    """Return labels/s that one client gives in batches of 100, and labels/s until all of them are tested."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (PREDICTIONS, classes)).round(3)
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1).tolist()
    with serving(HERE, classes) as (port, _), httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        ids: list[str] = []
        for start in range(0, PREDICTIONS, 500):
            body = {"logits": logits[start : start + 500].tolist(), "options": {"feedback": True, "top_k": 1}}
            answer = client.post("/calibrate", json=body, timeout=60).raise_for_status().json()
            ids += [prediction["id"] for prediction in answer["predictions"]]
        while client.get("/monitor").json()["seq"] < PREDICTIONS:  # also loads the compiled loops
            time.sleep(0.05)
        items = [{"id": own, "label": label} for own, label in zip(ids, labels, strict=True)]
        began, seq = time.perf_counter(), 0
        for start in range(0, PREDICTIONS, BATCH):
            body = {"items": items[start : start + BATCH]}
            answer = client.post("/feedback", json=body, timeout=60).raise_for_status().json()
            if answer["accepted"] != BATCH:
                raise SystemExit(f"not accepted: {answer}")
            seq = answer["seq"]
        accepted = time.perf_counter() - began
        while client.get("/monitor").json()["seq"] < seq:
            time.sleep(0.01)
        return PREDICTIONS / accepted, PREDICTIONS / (time.perf_counter() - began)


def main() -> None:
    """Measure, and print the ratios."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="checkout to compare with")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--only-requests", action="store_true", help="send no labels")
    given = parser.parse_args()
    for classes in given.classes:
        with ExitStack() as stack:
            here = stack.enter_context(serving(HERE, classes))
            if given.before is not None:
                before = stack.enter_context(serving(given.before.absolute(), classes))
            for rows in given.rows:
                print(f"K = {classes}, {rows} row{'s' * (rows > 1)} a request", flush=True)
                sides = {
                    "without": Side.of(*here, classes, rows, feedback=False),
                    "with": Side.of(*here, classes, rows, feedback=True),
                }
                if given.before is not None:
                    sides["before"] = Side.of(*before, classes, rows, feedback=False)
                compare(sides, given.pairs)
    if given.only_requests:
        return
    for classes in given.classes:
        given_rate, folded_rate = labels_per_second(classes)
        print(
            f"K = {classes}: {given_rate:.0f} labels/s accepted, {folded_rate:.0f} labels/s tested",
            flush=True,
        )


if __name__ == "__main__":
    main()
