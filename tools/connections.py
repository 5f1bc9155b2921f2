"""Measures predictions beside 1,000 idle and 500 half-open connections and a body of 2 GB at 10 kB/s.

`python -m tools.connections` prints the latencies of /predict and /health/live without and with them, and
when the slow body was refused.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import httpx

from boxcal.models.digits_data import load_digits_split
from tests.app.fitting.service import Service
from tools.hostile.cases import request
from tools.hostile.seeds import Seed

IDLE, HALF_OPEN = 1000, 500
SLOW_BYTES, BYTES_PER_SECOND = 2 * 10**9, 10_000
REFUSED_SECONDS = (10.0, 12.0)
"""In which time a body at this rate must be refused."""
PREDICTIONS = 1500
"""For each measurement, one after the other; /health/live is asked after every tenth."""


class Connections:
    """Clients that send nothing, half of a request, or a large body slowly, and connect again when closed.

    Attributes
    ----------
    refusals
        The status of each answer to the slow body, and after how many seconds it came.
    """

    def __init__(self, host: str, port: int, image: bytes) -> None:
        self._address = host, port
        whole = request(Seed("POST", "/predict", "image/png", image))
        self._half = whole[: len(whole) // 2]
        self._tasks: list[asyncio.Task[None]] = []
        self._opened = 0
        self.refusals: list[tuple[int, float]] = []
        self._all_open = asyncio.Event()

    async def start(self) -> None:
        """Open all of them."""
        self._tasks += [asyncio.create_task(self._hold(b"")) for _ in range(IDLE)]
        self._tasks += [asyncio.create_task(self._hold(self._half)) for _ in range(HALF_OPEN)]
        self._tasks.append(asyncio.create_task(self._slow()))
        await self._all_open.wait()

    async def stop(self) -> None:
        """Close all of them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _hold(self, sent: bytes) -> None:
        while True:
            with suppress(ConnectionError):
                reader, writer = await asyncio.open_connection(*self._address)
                self._opened += 1
                if self._opened == IDLE + HALF_OPEN:
                    self._all_open.set()
                writer.write(sent)
                while await reader.read(1024):
                    pass
                writer.close()

    async def _slow(self) -> None:
        head = b"POST /fit HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=b\r\n"
        piece = b"%x\r\n%b\r\n" % (BYTES_PER_SECOND // 10, bytes(BYTES_PER_SECOND // 10))
        while True:
            with suppress(ConnectionError):
                reader, writer = await asyncio.open_connection(*self._address)
                began = time.monotonic()
                answer = asyncio.create_task(reader.readline())
                writer.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
                for _ in range(SLOW_BYTES // len(piece)):
                    writer.write(piece)
                    await writer.drain()
                    if (await asyncio.wait([answer], timeout=0.1))[0]:
                        break
                self.refusals.append((int((await answer).split()[1]), time.monotonic() - began))
                writer.close()


async def measure(url: str, image: bytes) -> tuple[float, float, float]:
    """Predict one after the other; gives median and p99, and the longest of /health/live, in ms."""
    predictions, lives = [], []
    headers = {"content-type": "image/png"}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        for number in range(PREDICTIONS):
            began = time.perf_counter()
            (await client.post("/predict", content=image, headers=headers)).raise_for_status()
            predictions.append(time.perf_counter() - began)
            if number % 10 == 0:
                began = time.perf_counter()
                (await client.get("/health/live")).raise_for_status()
                lives.append(time.perf_counter() - began)
    p99 = statistics.quantiles(predictions, n=100)[98]
    return 1e3 * statistics.median(predictions), 1e3 * p99, 1e3 * max(lives)


async def run(url: str) -> int:
    """Measure without, with and again without the connections; give 1 if a limit is exceeded."""
    image = load_digits_split().test.png(0)
    parsed = httpx.URL(url)
    connections = Connections(parsed.host, parsed.port or 0, image)
    await measure(url, image)
    rows = {"alone": await measure(url, image)}
    await connections.start()
    began = time.monotonic()
    rows["with connections"] = await measure(url, image)
    await asyncio.sleep(max(0.0, 2 * REFUSED_SECONDS[1] - (time.monotonic() - began)))
    await connections.stop()
    rows["alone again"] = await measure(url, image)
    for name, (median, p99, live) in rows.items():
        print(f"{name:17} /predict median {median:.2f} ms, p99 {p99:.2f} ms; /health/live max {live:.2f} ms")
    for status, seconds in connections.refusals[:5]:
        print(f"the slow body was refused with {status} after {seconds:.1f} s")
    first, last = REFUSED_SECONDS
    refused = connections.refusals and all(s == 408 and first <= t <= last for s, t in connections.refusals)
    calm = max(rows["alone"][1], rows["alone again"][1])
    _, p99, live = rows["with connections"]
    return int(p99 > 2 * calm or live > 100 or not refused)


def main() -> int:
    """Run, and give 1 if a limit is exceeded."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit[0], 4096), limit[1]))
    with (
        tempfile.TemporaryDirectory(prefix="boxcal-connections-") as folder,
        Service(Path(folder)) as service,
    ):
        return asyncio.run(run(service.url))


if __name__ == "__main__":
    sys.exit(main())
