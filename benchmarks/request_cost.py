"""Processor time of one small request inside the application: `python -m benchmarks.request_cost`.

`POST /calibrate` with one row of logits in JSON, passed to the application without a server or a socket. A
round measures two sides by turns, each in a process of its own: the service as it is, and by default with
`prometheus_client.Histogram` in place of its own histograms; with `--before CHECKOUT`, the code of another
checkout. Each is the least of 60 means of 128 requests, in time of the thread: what else runs on the machine
disturbs it little.
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
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
from starlette.types import Message

from boxcal.app.main import create_app
from boxcal.app.observability import telemetry
from boxcal.app.settings.service import Settings

BLOCKS, REQUESTS = 60, 128
HERE = Path(__file__).parents[1]


def library_histogram(
    name: str, documentation: str, bounds: Any, labels: Any = (), *, registry: Any
) -> prometheus_client.Histogram:
    """Make a histogram of the library with the arguments of `FastHistogram`."""
    made = prometheus_client.Histogram(name, documentation, labels, buckets=bounds, registry=registry)
    if not labels:
        made.labels = lambda *_: made  # type: ignore[method-assign]
    return made


async def measure(classes: int) -> float:
    """Answer requests, and give the microseconds of the fastest block."""
    rows = np.random.default_rng(0).normal(0, 3, (16, 1, classes)).round(4)
    bodies = [json.dumps({"logits": row.tolist(), "options": {"top_k": 1}}).encode() for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        app = create_app(Settings(data_dir=Path(folder), model=f"logits:{classes}"))
        async with app.router.lifespan_context(app) as state:

            async def answer(body: bytes) -> None:
                async def receive() -> Message:
                    return {"type": "http.request", "body": body, "more_body": False}

                async def send(message: Message) -> None:
                    if message.get("status", 200) != 200:
                        raise SystemExit(f"status {message['status']}")

                headers = [
                    (b"host", b"localhost"),
                    (b"content-type", b"application/json"),
                    (b"content-length", b"%d" % len(body)),
                ]
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


def cost(side: str, classes: int, checkout: Path) -> float:
    """Measure one side in a process of its own, with the code of a checkout."""
    command = [sys.executable, "-P", __file__, "--side", side, "--classes", str(classes)]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    return float(subprocess.check_output(command, env=environment, cwd=checkout, stderr=subprocess.DEVNULL))


def compare(classes: int, rounds: int, before: Path | None) -> None:
    """Measure both sides by turns, and print their medians and the median ratio with its quartiles."""
    name, other = ("before", before) if before else ("library", HERE)
    pairs = []
    for number in range(rounds):
        sides = [("own", HERE), (name, other)]
        costs = {side: cost(side, classes, path) for side, path in sides[:: -1 if number % 2 else 1]}
        pairs.append((costs["own"], costs[name]))
    own, others = zip(*pairs, strict=True)
    first, second = (own, others) if before else (others, own)
    low, middle, high = statistics.quantiles([a / b for a, b in zip(first, second, strict=True)], n=4)
    names = f"now / {name}" if before else "library's histograms / own"
    print(
        f"K = {classes}: {names} {statistics.median(first):.1f} / {statistics.median(second):.1f} µs, "
        f"ratio {middle:.3f} ({low:.3f} to {high:.3f}), least {min(first):.1f} / {min(second):.1f} µs",
        flush=True,
    )


def main() -> None:
    """Compare, or measure one side."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--before", type=Path, help="checkout to compare with")
    parser.add_argument("--side", help="measure this side and print it")
    given = parser.parse_args()
    if given.side:
        if given.side == "library":
            telemetry.FastHistogram = library_histogram  # type: ignore[assignment,attr-defined]
        print(asyncio.run(measure(given.classes[0])))
        return
    for classes in given.classes:
        compare(classes, given.rounds, given.before and given.before.absolute())


if __name__ == "__main__":
    main()
