"""Measures the service under overload: `python -m benchmarks.overload [SECONDS] [--times 3]`.

It first measures the capacity: responses/s with enough connections to keep the service busy. Then images
arrive at three times that rate, on a fixed schedule, by default for five minutes, each with a timeout. It
prints the throughput of successful responses relative to the capacity, the latency of rejections and of
health checks, and the memory. Service, load generator and health checks are separate processes on one
machine.
"""

from __future__ import annotations

import argparse
import io
import math
import multiprocessing
import statistics
import time
from concurrent.futures import Future, ProcessPoolExecutor

import numpy as np
import psutil
from PIL import Image
from sklearn.datasets import load_sample_image

from benchmarks.serving.load import OK, Connection, Generator, Outcome, Phase
from benchmarks.serving.payloads import JPEG, Request
from benchmarks.serving.running import service

SATURATING = 16
CONNECTIONS = 512
"""More connections than concurrent requests under overload, so that no request waits for one."""


def generate(port: int, requests: list[bytes], phase: Phase) -> Outcome:
    return Generator(port, requests).run(phase)


def check_health(port: int, seconds: float) -> list[float]:
    """Check health ten times per second; return each latency, infinity if the status is not 200."""
    connection = Connection(port)
    took = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        connection.send(b"GET /health/ready HTTP/1.1\r\nhost: x\r\n\r\n", began)
        while (status := connection.receive()) is None:
            pass
        took.append(time.perf_counter() - began if status == OK else math.inf)
        time.sleep(0.1)
    connection.socket.close()
    return took


def photographs(side: int, count: int) -> list[bytes]:
    """Cut JPEG images from the photograph in scikit-learn."""
    photograph = Image.fromarray(load_sample_image("china.jpg"))
    images = []
    for left in np.linspace(0, photograph.width - side, count).astype(int).tolist():
        encoded = io.BytesIO()
        photograph.crop((left, 20, left + side, 20 + side)).save(encoded, format="JPEG", quality=90)
        images.append(encoded.getvalue())
    return images


def watch(
    load: Future[Outcome], port: int, process: psutil.Process, seconds: float
) -> tuple[Outcome, list[float], list[float]]:
    late: list[float] = []
    memory: list[float] = []
    while not load.done():
        late += check_health(port, min(2.0, seconds / 10))
        memory.append(process.memory_info().rss / 2**20)
    return load.result(), late, memory


def quantile(values: list[float], share: float) -> float:
    """Return a quantile in milliseconds; NaN without values."""
    return float(np.quantile(values, share)) * 1e3 if values else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float, nargs="?", default=300.0)
    parser.add_argument("--times", type=float, default=3.0, help="of the capacity")
    parser.add_argument("--timeout-ms", type=float, default=1000.0, help="of every request")
    parser.add_argument("--model", default="torchvision:mobilenet_v3_small")
    options = parser.parse_args()
    path = f"/predict?timeout_ms={options.timeout_ms:g}"
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other,
        service(model=options.model, weights="random") as (port, process),
    ):
        requests = [Request(path, JPEG, image).encoded(port) for image in photographs(400, 16)]

        def start(name: str, seconds: float, connections: int, rate: float | None = None) -> Future[Outcome]:
            return other.submit(generate, port, requests, Phase(name, seconds, connections, rate))

        start("warm", 3.0, SATURATING).result()
        capacity = start("saturation", 8.0, SATURATING).result().throughput
        print(
            f"capacity {capacity:.1f}/s; now {options.times:g} times that for {options.seconds:g} s",
            flush=True,
        )
        load = start("overload", options.seconds, CONNECTIONS, options.times * capacity)
        outcome, late, memory = watch(load, port, process, options.seconds)
        again = start("afterwards", 8.0, SATURATING).result().throughput
    answered = outcome.latencies
    refused, expired = outcome.refused.get("503", []), outcome.refused.get("504", [])
    other_failures = {reason: n for reason, n in outcome.failures.items() if reason not in ("503", "504")}
    in_time = sum(value <= options.timeout_ms / 1e3 for value in answered)
    quarter = len(memory) // 4
    print(
        f"answered {len(answered)}, in time {in_time}: goodput {in_time / options.seconds:.1f}/s, "
        f"{in_time / options.seconds / max(capacity, again):.3f} of the higher capacity, before or after\n"
        f"answered: p50 {quantile(answered, 0.5):.0f} ms, p99 {quantile(answered, 0.99):.0f} ms "
        f"(timeout {options.timeout_ms:g} ms)\n"
        f"refused with 503: {len(refused)}, p50 {quantile(refused, 0.5):.1f} ms, "
        f"p99 {quantile(refused, 0.99):.1f} ms; expired with 504: {len(expired)}; other: {other_failures}\n"
        f"health: {len(late)} checks, p99 {quantile(late, 0.99):.1f} ms, latest {max(late) * 1e3:.1f} ms\n"
        f"memory: {statistics.median(memory[:quarter] or memory):.0f} MB in the first quarter, "
        f"{statistics.median(memory[-quarter:] or memory):.0f} MB in the last, at most {max(memory):.0f} MB\n"
        f"capacity afterwards {again:.1f}/s"
    )


if __name__ == "__main__":
    main()
