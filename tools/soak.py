"""Sends good and hostile requests to a running service for a while: `python -m tools.soak 60`.

No good request may fail, and the memory of the service must not grow after the first sixth of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.app.fitting.service import Service
from tests.app.fitting.validation_data import CONTENT_TYPE, form, validation_npz
from tools.hostile.bodies import json_bodies, png, progressive_jpeg
from tools.hostile.cases import Case, Cases, request
from tools.hostile.exchange import Answer, Broken, exchange, judge
from tools.hostile.seeds import JSON, Seed
from tools.hostile.uploads import HOSTILE

GOOD_PER_SECOND, HOSTILE_PER_SECOND = 8.0, 2.0
HEAVY_SECONDS = 20.0
"""Between requests that cost far more than their size."""
FIT_SECONDS = 240.0
"""From a fit that is activated to the next."""
FIT_WAIT, HEAVY_WAIT = 900, 30.0
"""Seconds in which a fit must end, even on a busy machine, and the service's default timeout."""
SAMPLE_SECONDS = 10.0
MAX_GROWTH = 20 * 2**20
WRITES = ("/fit", "/calibrators")
READS = (
    "/health/live",
    "/health/ready",
    "/metrics",
    "/stats",
    "/calibrators",
    "/fits",
    "/model",
    "/activations",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """The memory of the service at one time.

    Attributes
    ----------
    seconds
        Since the start.
    resident
        Bytes of the service, without its workers.
    """

    seconds: float
    resident: int


def good(cases: Cases) -> Iterator[Case]:
    """Predictions in every content type, and reads of other routes between them."""
    for number in itertools.count():
        if number % 4 == 3:
            path = READS[number // 4 % len(READS)]
            yield Case(f"GET {path}", request(Seed("GET", path)), paths=(path,))
        else:
            yield cases.valid(number)


def fits() -> Iterator[Case]:
    """Fits that are activated, each followed by a rollback."""
    upload = form(validation_npz(300), method="ts", activate="always")
    fit = Seed("POST", f"/fit?wait={FIT_WAIT}", CONTENT_TYPE, upload)
    rollback = Seed("POST", "/calibrators/rollback")
    while True:
        yield Case("fit", request(fit), seconds=FIT_WAIT, paths=("/fit",))
        yield Case("rollback", request(rollback), paths=("/calibrators/rollback",))


def heavy() -> Iterator[Case]:
    """Bodies that cost far more than their size, and uploads made to break the check."""
    while True:
        for name, path, body, _ in json_bodies():
            yield Case(name, request(Seed("POST", path, JSON, body)), seconds=HEAVY_WAIT, paths=(path,))
        images = {"image/png": png(60_000, 1), "image/jpeg": progressive_jpeg(1500)}
        for kind, body in (*images.items(), ("image/png", png(7000, 7000))):
            yield Case(
                kind, request(Seed("POST", "/predict", kind, body)), seconds=HEAVY_WAIT, paths=("/predict",)
            )
        for name, (_, _, make) in HOSTILE.items():
            body = form(make(), method="ts", activate="never")
            yield Case(name, request(Seed("POST", "/fit", CONTENT_TYPE, body)), seconds=120, paths=("/fit",))


class Soak:
    """Sends requests of several kinds, each at its rate, until the time is over.

    Attributes
    ----------
    faults
        What the service did wrong.
    statuses
        How often each status was answered.
    samples
        The memory over time.
    """

    def __init__(self, service: Service, seconds: float) -> None:
        self._service = service
        address = httpx.URL(service.url)
        self._address = (address.host, address.port or 0)
        self._document = service.client.get("/openapi.json").json()
        self._cases = Cases(time.time_ns(), self._document)
        self._began = time.monotonic()
        self._end = self._began + seconds
        self.faults: list[str] = []
        self.statuses: Counter[int] = Counter()
        self.samples: list[Sample] = []

    async def run(self) -> None:
        """Send everything."""
        drawn = (self._cases.draw(number) for number in itertools.count())
        # Requests that activate another calibrator are not hostile, but change what the good ones get.
        hostile = (case for case in drawn if not any(path.startswith(WRITES) for path in case.paths))
        async with asyncio.TaskGroup() as group:
            for cases, pause, check in (
                (good(self._cases), 1 / GOOD_PER_SECOND, self._must_succeed),
                (hostile, 1 / HOSTILE_PER_SECOND, self._must_not_fail),
                (heavy(), HEAVY_SECONDS, self._must_not_fail),
            ):
                group.create_task(self._send(cases, pause, check))
            group.create_task(self._fit())
            group.create_task(self._watch())

    async def _send(
        self, cases: Iterator[Case], pause: float, check: Callable[[Case, list[Answer]], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as group:
            due = loop.time()
            while due < self._end:
                await asyncio.sleep(due - loop.time())
                due = max(due + pause, loop.time())
                group.create_task(self._one(await asyncio.to_thread(next, cases), check))

    async def _fit(self) -> None:
        for case in fits():
            await self._one(case, self._must_succeed)
            if time.monotonic() + FIT_SECONDS / 2 > self._end:
                return
            await asyncio.sleep(FIT_SECONDS / 2)

    async def _one(self, case: Case, check: Callable[[Case, list[Answer]], None]) -> None:
        try:
            answers = await exchange(self._address, case, 40.0 if case.waits else None)
            check(case, answers)
            self.statuses.update(answer.status for answer in answers)
        except (Broken, OSError) as error:
            self.faults.append(f"{time.monotonic() - self._began:.0f} s, {case.name}: {error}")
            print(self.faults[-1], flush=True)

    def _must_succeed(self, _: Case, answers: list[Answer]) -> None:
        for answer in answers:
            if answer.status != httpx.codes.OK or (b'"state":"failed"' in answer.body):
                raise Broken(f"{answer.status}: {answer.body[:300]!r}")

    def _must_not_fail(self, case: Case, answers: list[Answer]) -> None:
        judge(case, answers, self._document)

    async def _watch(self) -> None:
        while time.monotonic() < self._end:
            resident = self._service.process.memory_info().rss
            self.samples.append(Sample(time.monotonic() - self._began, resident))
            if len(self.samples) % 6 == 0:
                processor = sum(self._service.process.cpu_times()[:2])
                print(
                    f"{self.samples[-1].seconds:6.0f} s: {resident / 2**20:.1f} MiB, "
                    f"{processor:.0f} s of processor time, {dict(sorted(self.statuses.items()))}",
                    flush=True,
                )
            await asyncio.sleep(SAMPLE_SECONDS)


def growth(samples: list[Sample]) -> float:
    """Compare the medians of two windows of a thirtieth of the time: after a sixth of it, and at its end."""
    last = samples[-1].seconds
    early = [s.resident for s in samples if last / 6 <= s.seconds <= last / 5]
    late = [s.resident for s in samples if s.seconds >= last - last / 30]
    return statistics.median(late) - statistics.median(early)


def main() -> int:
    """Run, and give 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description="Send good and hostile requests for a while.")
    parser.add_argument("minutes", type=float)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="boxcal-soak-") as name:
        with Service(
            Path(name),
            keep_versions="5",
            prelude="from boxcal.app.settings import limits; limits.KEEP_DAYS = 0.0",
        ) as service:
            soak = Soak(service, 60 * given.minutes)
            asyncio.run(soak.run())
            grown = growth(soak.samples)
            status = service.stop()
        failures = service.log().count("ERROR")
    print(f"{sum(soak.statuses.values()):,} answers: {dict(sorted(soak.statuses.items()))}")
    print(f"{len(soak.faults)} faults, {failures} errors in the log, exit status {status}")
    print(f"memory: {grown / 2**20:+.1f} MiB after the first sixth of the time")
    return 1 if soak.faults or failures or status or grown > MAX_GROWTH else 0


if __name__ == "__main__":
    sys.exit(main())
