"""Compares `/calibrate` with minimal implementations: `python -m benchmarks.calibrate_route [ROUNDS]`.

A request contains one row of 1000 logits in JSON, the response all probabilities in JSON; 16 connections are
busy. Each round measures, one after the other: a loop on one core without a server that parses, computes
softmax and serialises; plain FastAPI with orjson and NumPy in one process; and boxcal. Only ratios matter.
"""

from __future__ import annotations

import base64
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

from benchmarks.serving.contestants import PEERS
from benchmarks.serving.limits import logits
from benchmarks.serving.payloads import for_boxcal, free_port, random_logits, raw
from benchmarks.serving.running import run_part, service, started

CONNECTIONS = 16
SECONDS = 3.0
PHASES = [
    {"name": "warm-up", "seconds": 0.5, "connections": CONNECTIONS},
    {"name": "lone", "seconds": 0.5, "connections": 1},
    {"name": "saturation", "seconds": SECONDS, "connections": CONNECTIONS},
]


@contextmanager
def plain_fastapi() -> Iterator[tuple[int, psutil.Popen]]:
    port = free_port()
    command, settings = [sys.executable, str(PEERS / "plain_fastapi.py")], {"BENCH_TASK": "logits"}
    with started(command, f"http://127.0.0.1:{port}/ready", settings | {"BENCH_PORT": str(port)}) as process:
        yield port, process


def served(name: str, bodies: list[bytes]) -> dict[str, float]:
    """Measure one server: responses/s at saturation, median latency of one client, CPU time."""
    ours = service(model="torchvision:mobilenet_v3_small", weights="random")  # any with 1000 classes
    server, request = (ours, for_boxcal) if name == "boxcal" else (plain_fastapi(), raw)
    with server as (port, process):
        encoded = [base64.b64encode(request("logits", body).encoded(port)).decode() for body in bodies]
        plan = {"port": port, "requests": encoded, "phases": PHASES}
        used = process.cpu_times()
        warm, lone, full = run_part("load", plan=plan)
        spent = process.cpu_times()
    requests = sum(len(phase["latencies"]) for phase in (warm, lone, full))
    if full["failures"] or lone["failures"]:
        raise SystemExit(f"{name} failed requests: {full['failures']} {lone['failures']}")
    return {
        "rate": len(full["latencies"]) / full["elapsed"],
        "lone_ms": statistics.median(lone["latencies"]) * 1e3,
        "cpu_us": (spent.user + spent.system - used.user - used.system) / requests * 1e6,
    }


def main(rounds: int) -> None:
    bodies = random_logits(64)
    ratios = []
    for _ in range(rounds):
        loop = logits(bodies, SECONDS / 2)["limit"]
        plain = served("plain FastAPI", bodies)
        ours = served("boxcal", bodies)
        ratios.append((ours["rate"] / plain["rate"], ours["rate"] / loop, plain["rate"] / loop))
        print(
            f"bare loop {loop:.0f}/s; plain FastAPI {plain['rate']:.0f}/s, lone {plain['lone_ms']:.2f} ms, "
            f"{plain['cpu_us']:.0f} µs of processor; "
            f"boxcal {ours['rate']:.0f}/s, lone {ours['lone_ms']:.2f} ms, {ours['cpu_us']:.0f} µs",
            flush=True,
        )
    over_plain, of_bare, plain_of_bare = (statistics.median(column) for column in zip(*ratios, strict=True))
    print(
        f"median of {rounds} rounds: boxcal {over_plain:.2f} times plain FastAPI; "
        f"{of_bare:.2f} of the bare loop (plain FastAPI {plain_of_bare:.2f})"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
