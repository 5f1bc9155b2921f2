"""Processor time of one small request inside the application: `python -m benchmarks.request_cost [ROUNDS]`.

`POST /calibrate` with one row of 1000 logits in JSON, all probabilities in JSON, passed to the application
without a server or a socket. A round measures the service as it is, and with `prometheus_client.Histogram` in
place of its own histograms. Each is the least of 30 means of 128 requests, in time of the thread: what else
runs on the machine disturbs it little.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import prometheus_client
from starlette.types import Message

from benchmarks.serving.payloads import random_logits
from boxcal.app import telemetry
from boxcal.app.main import create_app
from boxcal.app.settings import Settings

BLOCKS, REQUESTS = 30, 128


def library_histogram(
    name: str, documentation: str, bounds: Any, labels: Any = (), *, registry: Any
) -> prometheus_client.Histogram:
    """Make a histogram of the library with the arguments of `FastHistogram`."""
    made = prometheus_client.Histogram(name, documentation, labels, buckets=bounds, registry=registry)
    if not labels:
        made.labels = lambda *_: made  # type: ignore[method-assign]
    return made


async def measure() -> float:
    """Answer requests, and give the microseconds of the fastest block."""
    bodies = [
        json.dumps({**json.loads(body), "options": {"probabilities": True, "top_k": 1}}).encode()
        for body in random_logits(16)
    ]
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(data_dir=Path(folder), model="torchvision:mobilenet_v3_small", weights="random")
        app = create_app(settings)
        async with app.router.lifespan_context(app) as state:

            async def answer(body: bytes) -> None:
                async def receive() -> Message:
                    return {"type": "http.request", "body": body, "more_body": False}

                async def send(message: Message) -> None:
                    if message.get("status", 200) != 200:
                        raise SystemExit(f"status {message['status']}")

                headers = [(b"host", b"here"), (b"content-type", b"application/json"), (b"accept", b"*/*")]
                scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/calibrate"}
                rest = {"query_string": b"", "headers": headers, "state": dict(state or {})}
                await app(scope | rest, receive, send)

            means = []
            for _ in range(BLOCKS):
                began = time.thread_time()
                for number in range(REQUESTS):
                    await answer(bodies[number % len(bodies)])
                means.append((time.thread_time() - began) / REQUESTS * 1e6)
    return min(means)


def main(rounds: int) -> None:
    """Measure both in turn, each in a process of its own."""
    ratios = []
    for _ in range(rounds):
        costs = []
        for variant in ("own", "library"):
            command = [sys.executable, "-m", "benchmarks.request_cost", variant]
            costs.append(float(subprocess.check_output(command, env=os.environ)))
        own, library = costs
        ratios.append(library / own - 1)
        print(
            f"own histograms {own:.1f} µs, the library's {library:.1f} µs: {library / own - 1:+.1%}",
            flush=True,
        )
    print(f"median of {rounds} rounds: {statistics.median(ratios):+.1%}")


if __name__ == "__main__":
    variant = sys.argv[1] if len(sys.argv) > 1 else "5"
    if variant.isdigit():
        main(int(variant))
    else:
        if variant == "library":
            telemetry.FastHistogram = library_histogram  # type: ignore[assignment,attr-defined]
        print(asyncio.run(measure()))
