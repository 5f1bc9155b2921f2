"""Sends damaged requests to a running service: `python -m tools.fuzz 100000 --seed 1`.

No answer may be an undocumented failure, or come later than its timeout plus a second. Afterwards the memory
of the service must be back, its data folder empty, and its log without errors.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tests.app.fitting.service import Service
from tools.hostile.cases import Case, Cases
from tools.hostile.exchange import Answer, Broken, exchange, judge
from tools.hostile.seeds import DEFAULT_SECONDS, ENDLESS

CONNECTIONS = 8
WAITING_CONNECTIONS = 200
"""Connections of clients that wait for the service to give them up."""
LIMIT_SECONDS = 3.0
"""For heads and bodies that do not arrive; so that a short run sees their end."""
CLOSE_SECONDS = 2 * LIMIT_SECONDS + 2
"""The service looks once a second, and for bodies measures from look to look."""
MEMORY_BYTES = 100 * 2**20
WARM_UP = 300
VALID_EVERY = 50
MAX_SHOWN = 30
SCHEMATHESIS_CONFIG = Path(__file__).parent / "hostile" / "schemathesis.toml"
PRELUDE = f"""
from boxcal.app.settings import limits
limits.TIMEOUT_SECONDS = {DEFAULT_SECONDS}
from boxcal.app.http import protocol
protocol.IDLE_SECONDS = protocol.HEAD_SECONDS = protocol.STALL_SECONDS = {LIMIT_SECONDS}
"""


class Fuzzer:
    """Sends cases, a few at a time.

    Parameters
    ----------
    document
        The OpenAPI document of the service.

    Attributes
    ----------
    statuses
        How often each status was answered.
    faults
        What the service did wrong, by case.
    """

    def __init__(self, url: str, seed: int, document: Mapping[str, Any]) -> None:
        address = httpx.URL(url)
        self._address = (address.host, address.port or 0)
        self._document = document
        self._cases = Cases(seed, document)
        self._places = asyncio.Semaphore(CONNECTIONS)
        self._waiting_places = asyncio.Semaphore(WAITING_CONNECTIONS)
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []

    async def run(self, first: int, count: int) -> None:
        """Send `count` cases from the number `first` on."""
        async with asyncio.TaskGroup() as group:
            for number in range(first, first + count):
                case = self._cases.valid(number) if number % VALID_EVERY == 0 else self._cases.draw(number)
                places = self._waiting_places if case.waits else self._places
                await places.acquire()
                group.create_task(self._send(case, places))

    async def _send(self, case: Case, places: asyncio.Semaphore) -> None:
        try:
            answers = await exchange(self._address, case, CLOSE_SECONDS if case.waits else None)
            judge(case, answers, self._document)
            if "valid" in case.name and answers[0].status != httpx.codes.OK:
                raise Broken(f"{answers[0].status}: {answers[0].body[:300]!r}")
            self.statuses.update(answer.status for answer in answers)
            await self._cancel(answers)
        except (Broken, OSError) as error:
            self.faults.append(
                f"{case.name}: {error}\n    sent {len(case.data):,} bytes: {case.data[:300]!r}"
            )
        finally:
            places.release()

    async def _cancel(self, answers: list[Answer]) -> None:
        """Give the places of accepted fits back."""
        for answer in answers:
            if "location" in answer.headers and "/fits/" in answer.headers["location"]:
                head = f"DELETE {answer.headers['location']} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
                await exchange(self._address, Case("cancel", head.encode(), seconds=60))


def fuzz(count: int, seed: int, folder: Path) -> list[str]:
    """Run the fuzzer and schemathesis against a new service; gives what was wrong."""
    with Service(folder, prelude=PRELUDE) as service:
        document = service.client.get("/openapi.json").json()
        fuzzer = Fuzzer(service.url, seed, document)
        with asyncio.Runner() as runner:
            runner.run(fuzzer.run(0, min(WARM_UP, count)))
            before = service.process.memory_info().rss
            began = time.monotonic()
            runner.run(fuzzer.run(WARM_UP, max(0, count - WARM_UP)))
        print(f"{len(fuzzer.faults)} faults after {time.monotonic() - began:.0f} s")
        faults = fuzzer.faults + schemathesis(service.url, count, seed)
        seconds = time.monotonic() - began
        faults += remains(service, before)
        print(f"{count:,} cases in {seconds:.0f} s; statuses: {dict(sorted(fuzzer.statuses.items()))}")
        if service.stop() != 0:
            faults.append("the service did not end with status 0")
    return faults


def schemathesis(url: str, count: int, seed: int) -> list[str]:
    """Run all checks of schemathesis, with a number of examples that suits the count of cases."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(SCHEMATHESIS_CONFIG),
        "run", f"{url}/openapi.json", "--exclude-path", ENDLESS,
        "--seed", str(seed), "--max-examples", str(max(1, count // 5000)), "--continue-on-failure",
        "--request-timeout", "60", "--suppress-health-check", "all", "--no-color",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [] if done.returncode == 0 else [f"schemathesis:\n{done.stdout[-10_000:]}"]


def remains(service: Service, memory: int) -> list[str]:
    """Wait for the end of all fits; gives what the service has kept of what it was sent."""
    faults = []
    deadline = time.monotonic() + 120
    while any(fit["state"] in ("queued", "running") for fit in service.client.get("/fits").json()["fits"]):
        if time.monotonic() > deadline:
            faults.append("a fit has not ended")
            break
        time.sleep(0.1)
    growth = service.process.memory_info().rss - memory
    print(f"memory: {memory / 2**20:.0f} MiB, {growth / 2**20:+.0f} MiB afterwards")
    if growth > MEMORY_BYTES:
        faults.append(f"the memory has grown by {growth:,} bytes")
    (own,) = [path for path in (service.data_dir / "work").iterdir() if path.is_dir()]
    if left := {path.name for path in own.iterdir()} - {".alive", "head.npy"}:
        faults.append(f"left in the work folder: {left}")
    known = {"boxcal.sqlite3", "boxcal.sqlite3-wal", "boxcal.sqlite3-shm", "service.log", "work"}
    if left := {path.name for path in service.data_dir.iterdir()} - known:
        faults.append(f"left in the data folder: {left}")
    if failures := re.findall(r"(?:CRITICAL|ERROR).*|^\w*Error.*", service.log(), re.MULTILINE):
        faults.append(f"the log has {len(failures)} errors, such as {failures[:5]}")
    if "\x1b" in service.log():
        faults.append("the log has control characters")
    return faults


def main() -> int:
    """Run, and give 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description="Send damaged requests to a running service.")
    parser.add_argument("count", type=int, help="cases to send")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="boxcal-fuzz-") as folder:
        faults = fuzz(given.count, given.seed, Path(folder))
    for fault in faults[:MAX_SHOWN]:
        print(fault)
    print(f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
