"""What feedback costs: `python -m benchmarks.feedback_route [--before CHECKOUT] [--rounds N] [--classes K]`.

Each round starts the service with `BOXCAL_MODEL=logits:K` and measures `/calibrate` with one row a request:
from another checkout if one is given, then from this one, without and with the option `feedback`. It reports
requests a second with eight connections, the median latency of one, and processor time a request of the whole
process, the threads that store and fold included. The last part sends the labels of 5,000 predictions in
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import psutil

from benchmarks.overload import wait_until_ready
from benchmarks.serving.payloads import Request, free_port
from benchmarks.serving.running import run_part

CONNECTIONS = 8
SECONDS = 3.0
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


def cost(checkout: Path, classes: int, *, feedback: bool) -> tuple[float, float, float]:
    """Return requests/s, median latency in ms, and processor time a request in µs."""
    options = {"top_k": 1, **({"feedback": True} if feedback else {})}
    rows = np.random.default_rng(0).normal(0, 3, (64, classes)).round(4)
    bodies = [json.dumps({"logits": [row.tolist()], "options": options}).encode() for row in rows]
    with serving(checkout, classes) as (port, process):
        requests = [Request("/calibrate", "application/json", body).encoded(port) for body in bodies]
        plan = {
            "port": port,
            "requests": [base64.b64encode(request).decode() for request in requests],
            "phases": [
                {"name": "lone", "seconds": SECONDS / 2, "connections": 1},
                {"name": "full", "seconds": SECONDS, "connections": CONNECTIONS},
            ],
        }
        run_part("load", plan=plan)  # loads the compiled loops
        time.sleep(1.0)
        used = process.cpu_times()
        phases = run_part("load", plan=plan)
        spent = process.cpu_times()
    lone, full = phases
    if any(phase["failures"] for phase in phases):
        raise SystemExit("requests failed")
    count = sum(len(phase["latencies"]) for phase in phases)
    seconds = spent.user + spent.system - used.user - used.system
    rate = len(full["latencies"]) / full["elapsed"]
    return rate, statistics.median(lone["latencies"]) * 1e3, seconds / count * 1e6


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
    """Measure, and print every round and the medians of the ratios."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--classes", type=int, default=100)
    given = parser.parse_args()
    sides: dict[str, tuple[Path, bool]] = {"without": (HERE, False), "with": (HERE, True)}
    if given.before is not None:
        sides = {"before": (given.before.absolute(), False), **sides}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}
    for number in range(given.rounds):
        for name, (checkout, feedback) in sorted(sides.items(), reverse=bool(number % 2)):
            rate, lone, processor = cost(checkout, given.classes, feedback=feedback)
            found[name].append((rate, lone, processor))
            print(
                f"{name:>8}: {rate:6.0f}/s, lone {lone:.3f} ms, {processor:.0f} µs of processor", flush=True
            )
    for name, base in (("without", "before"), ("with", "without")):
        if base in found:
            pairs = list(zip(found[name], found[base], strict=True))
            rate, lone, processor = (statistics.median(a[n] / b[n] for a, b in pairs) for n in range(3))
            print(
                f"{name} / {base}: rate {rate:.3f}, lone latency {lone:.3f}, processor time {processor:.3f}"
            )
    for classes in (10, 100):
        given_rate, folded_rate = labels_per_second(classes)
        print(
            f"K = {classes}: {given_rate:.0f} labels/s accepted, {folded_rate:.0f} labels/s tested",
            flush=True,
        )


if __name__ == "__main__":
    main()
