"""Compares `/calibrate` with minimal implementations: `python -m benchmarks.calibrate_route [ROUNDS]`.

A request contains one row of 1000 logits in JSON, the response all probabilities in JSON; 16 connections are
busy. Each round measures, one after the other: a loop on one core without a server that parses, computes
softmax and serialises; plain FastAPI with orjson and NumPy in one process; and boxcal. Only ratios matter.
"""

from __future__ import annotations

import base64
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks.serving.payloads import Request, for_boxcal, free_port, random_logits, raw
from benchmarks.serving.peers.work import softmax_json
from benchmarks.serving.running import BOXCAL, run_part, started

PEERS = Path(__file__).parent / "serving" / "peers"
CONNECTIONS = 16
SECONDS = 3.0
SERVERS = {
    "boxcal": (BOXCAL, "/health/ready"),
    "plain FastAPI": ([sys.executable, str(PEERS / "plain_fastapi.py")], "/ready"),
}


@contextmanager
def serving(name: str, port: int) -> Iterator[psutil.Process]:
    """Run one of the servers in a separate process while the block runs."""
    command, ready = SERVERS[name]
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "BENCH_PORT": str(port),
            "BENCH_TASK": "logits",
            "BOXCAL_PORT": str(port),
            "BOXCAL_DATA_DIR": folder,
            "BOXCAL_MODEL": "torchvision:mobilenet_v3_small",  # any with 1000 classes
            "BOXCAL_WEIGHTS": "random",
        }
        with started(command, f"http://127.0.0.1:{port}{ready}", settings) as process:
            yield process


def served(name: str, bodies: list[bytes]) -> dict[str, float]:
    """Measure one server: responses/s at saturation, median latency of one client, CPU time."""
    port = free_port()
    asked: list[Request] = [
        for_boxcal("logits", body) if name == "boxcal" else raw("logits", body) for body in bodies
    ]
    plan = {
        "port": port,
        "requests": [base64.b64encode(request.encoded(port)).decode() for request in asked],
        "phases": [
            {"name": "warm-up", "seconds": 0.5, "connections": CONNECTIONS},
            {"name": "lone", "seconds": 0.5, "connections": 1},
            {"name": "saturation", "seconds": SECONDS, "connections": CONNECTIONS},
        ],
    }
    with serving(name, port) as process:
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


def bare(bodies: list[bytes]) -> float:
    """Measure the loop without a server, in rows/s."""
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < SECONDS / 2:
        softmax_json(bodies[count % len(bodies)])
        count += 1
    return count / elapsed


def main(rounds: int) -> None:
    """Measure, and print each round and the medians of the ratios."""
    bodies = random_logits(64)
    ratios = []
    for _ in range(rounds):
        loop = bare(bodies)
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
