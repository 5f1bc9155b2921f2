"""The service at a multiple of what it can do: `python -m benchmarks.overload [SECONDS] [--times 3]`.

It first measures the capacity: answers a second with enough connections to keep the service busy. Then
pictures arrive at three times that rate, on a fixed schedule and for five minutes unless told otherwise, each
with a timeout. Printed is what matters on a bad day: how many answers come in time beside the capacity, how
soon the others are refused, whether health answers, and what memory does. Service, load and health checks
are processes of their own on one machine, so the load takes its share of the cores.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import math
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
from PIL import Image
from sklearn.datasets import load_sample_image

from benchmarks.serving.payloads import JPEG, Request, free_port

HOST = "127.0.0.1"
SATURATING = 16
IDLE_CONNECTIONS = 64


@dataclass
class Tally:
    """Latencies in seconds by status; status 0 is a connection that broke."""

    by_status: dict[int, list[float]] = field(default_factory=dict)

    def add(self, status: int, seconds: float) -> None:
        """Count one answer."""
        self.by_status.setdefault(status, []).append(seconds)

    def of(self, *statuses: int) -> list[float]:
        """Give the latencies of these statuses."""
        return [value for status in statuses for value in self.by_status.get(status, [])]


class Connection:
    """One keep-alive connection that asks one question at a time."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> int:
        """Send a request and read its answer; a status, or 0 where the connection broke."""
        try:
            if self._streams is not None and self._streams[0].at_eof():
                self.close()  # idle for so long that the server has closed it
            if self._streams is None:
                self._streams = await asyncio.open_connection(HOST, self._port)
            reader, writer = self._streams
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.split(b":")[1])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length")
            )
            await reader.readexactly(length)
            if b"connection: close" in head.lower():
                self.close()
            return int(head[9:12])
        except (OSError, asyncio.IncompleteReadError):
            self.close()
            return 0

    def close(self) -> None:
        """Give the socket back."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def saturate(port: int, requests: list[bytes], seconds: float, connections: int) -> Tally:
    """Keep so many connections busy."""
    tally = Tally()
    until = time.perf_counter() + seconds

    async def one(number: int) -> None:
        connection = Connection(port)
        while (began := time.perf_counter()) < until:
            number += 1
            tally.add(await connection.ask(requests[number % len(requests)]), time.perf_counter() - began)
        connection.close()

    await asyncio.gather(*(one(number * 7) for number in range(connections)))
    return tally


async def flood(port: int, requests: list[bytes], seconds: float, rate: float) -> Tally:
    """Send on a fixed schedule, each latency counted from when the request was due."""
    tally = Tally()
    idle = [Connection(port) for _ in range(IDLE_CONNECTIONS)]
    running: set[asyncio.Task[None]] = set()
    start = time.perf_counter()

    async def one(due: float, number: int) -> None:
        connection = idle.pop() if idle else Connection(port)
        tally.add(await connection.ask(requests[number % len(requests)]), time.perf_counter() - due)
        idle.append(connection)

    for number in range(int(rate * seconds)):
        due = start + number / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(one(due, number))
        running.add(task)
        task.add_done_callback(running.discard)
    await asyncio.gather(*running)
    return tally


async def check_health(port: int, seconds: float) -> list[float]:
    """Ask for health ten times a second, and give how late every answer came."""
    connection = Connection(port)
    late = []
    until = time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        request = b"GET /health/ready HTTP/1.1\r\nhost: x\r\n\r\n"
        status = await connection.ask(request)
        late.append(time.perf_counter() - began if status == 200 else math.inf)
        await asyncio.sleep(0.1)
    connection.close()
    return late


def run_saturate(port: int, requests: list[bytes], seconds: float) -> Tally:
    """Run `saturate` in this process."""
    return asyncio.run(saturate(port, requests, seconds, SATURATING))


def run_flood(port: int, requests: list[bytes], seconds: float, rate: float) -> Tally:
    """Run `flood` in this process."""
    return asyncio.run(flood(port, requests, seconds, rate))


def wait_until_ready(process: subprocess.Popen[bytes], port: int) -> None:
    """Ask until the service says that it is ready."""
    while True:
        if process.poll() is not None:
            raise SystemExit("the service did not start")
        try:
            urllib.request.urlopen(f"http://{HOST}:{port}/health/ready", timeout=1).close()
        except OSError:
            time.sleep(0.01)
        else:
            return


@contextmanager
def serving(model: str) -> Iterator[tuple[int, psutil.Process]]:
    """Run the service for as long as the block lasts."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        settings = {
            "BOXCAL_PORT": str(port),
            "BOXCAL_DATA_DIR": folder,
            "BOXCAL_MODEL": model,
            "BOXCAL_WEIGHTS": "random",
        }
        command = [str(Path(sys.executable).with_name("boxcal")), "serve"]
        process = subprocess.Popen(command, env=os.environ | settings, stderr=subprocess.DEVNULL)
        try:
            wait_until_ready(process, port)
            yield port, psutil.Process(process.pid)
        finally:
            process.terminate()
            print(f"the service ended with status {process.wait()}")


def photographs(side: int, count: int) -> list[bytes]:
    """Cut JPEG pictures from the photograph that scikit-learn brings."""
    photograph = Image.fromarray(load_sample_image("china.jpg"))
    pictures = []
    for left in np.linspace(0, photograph.width - side, count).astype(int).tolist():
        encoded = io.BytesIO()
        photograph.crop((left, 20, left + side, 20 + side)).save(encoded, format="JPEG", quality=90)
        pictures.append(encoded.getvalue())
    return pictures


def watch(
    load: Future[Tally], port: int, service: psutil.Process, seconds: float
) -> tuple[Tally, list[float], list[float]]:
    """While the load runs, ask for health and read memory (in MB)."""
    late: list[float] = []
    memory: list[float] = []
    while not load.done():
        late += asyncio.run(check_health(port, min(2.0, seconds / 10)))
        memory.append(service.memory_info().rss / 2**20)
    return load.result(), late, memory


def quantile(values: list[float], share: float) -> float:
    """Give a quantile in milliseconds; NaN of nothing."""
    return float(np.quantile(values, share)) * 1e3 if values else math.nan


def main() -> None:
    """Measure the capacity, then the overload, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float, nargs="?", default=300.0)
    parser.add_argument("--times", type=float, default=3.0, help="of the capacity")
    parser.add_argument("--timeout-ms", type=float, default=1000.0, help="of every request")
    parser.add_argument("--model", default="torchvision:mobilenet_v3_small")
    options = parser.parse_args()
    path = f"/predict?timeout_ms={options.timeout_ms:g}"
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other,
        serving(options.model) as (port, service),
    ):
        requests = [Request(path, JPEG, picture).encoded(port) for picture in photographs(400, 16)]
        other.submit(run_saturate, port, requests, 3.0).result()
        capacity = len(other.submit(run_saturate, port, requests, 8.0).result().of(200)) / 8.0
        print(
            f"capacity {capacity:.1f}/s; now {options.times:g} times that for {options.seconds:g} s",
            flush=True,
        )
        load = other.submit(run_flood, port, requests, options.seconds, options.times * capacity)
        tally, late, memory = watch(load, port, service, options.seconds)
        again = len(other.submit(run_saturate, port, requests, 8.0).result().of(200)) / 8.0
    answered, refused, expired = tally.of(200), tally.of(503), tally.of(504)
    broken = {
        status: len(values) for status, values in tally.by_status.items() if status not in (200, 503, 504)
    }
    in_time = sum(value <= options.timeout_ms / 1e3 for value in answered)
    quarter = len(memory) // 4
    print(
        f"answered {len(answered)}, in time {in_time}: goodput {in_time / options.seconds:.1f}/s, "
        f"{in_time / options.seconds / capacity:.2f} of the capacity\n"
        f"answered: p50 {quantile(answered, 0.5):.0f} ms, p99 {quantile(answered, 0.99):.0f} ms "
        f"(timeout {options.timeout_ms:g} ms)\n"
        f"refused with 503: {len(refused)}, p50 {quantile(refused, 0.5):.1f} ms, "
        f"p99 {quantile(refused, 0.99):.1f} ms; expired with 504: {len(expired)}; other: {broken}\n"
        f"health: {len(late)} checks, p99 {quantile(late, 0.99):.1f} ms, latest {max(late) * 1e3:.1f} ms\n"
        f"memory: {statistics.median(memory[:quarter] or memory):.0f} MB in the first quarter, "
        f"{statistics.median(memory[-quarter:] or memory):.0f} MB in the last, at most {max(memory):.0f} MB\n"
        f"capacity afterwards {again:.1f}/s"
    )


if __name__ == "__main__":
    main()
