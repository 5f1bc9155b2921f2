"""Sends damaged requests to a running service: `python -m tools.fuzz 100000 --seed 1`.

Half of them are valid requests with damage anywhere; the others are drawn from the grammars of the formats,
over HTTP and gRPC. No answer may be an undocumented failure, come later than its timeout plus a second, or be
much larger than its request; no request may keep the event loop for more than 100 ms of processor time.
Afterwards the memory of the service must be back, its data folder empty, and its log without errors.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx

from tests.app.fitting.service import Service, free_port
from tests.app.registry.postgresql import PostgreSQL
from tools.hostile.cases import Case, Cases
from tools.hostile.exchange import GRACE_SECONDS, Answer, Broken, exchange, judge
from tools.hostile.grammars import Call, Structured
from tools.hostile.seeds import DEFAULT_SECONDS, ENDLESS
from tools.hostile.watched import PAUSES

CONNECTIONS = 8
WAITING_CONNECTIONS = 200
"""Connections of clients that wait for the service to give them up."""
LIMIT_SECONDS = 3.0
"""For heads and bodies that do not arrive; so that a short run sees their end."""
CLOSE_SECONDS = 2 * LIMIT_SECONDS + 2
"""The service looks once a second, and for bodies measures from look to look."""
MEMORY_BYTES = 32 * 2**20
ANSWER_BYTES, ANSWER_FACTOR = 2**20, 200
"""Most bytes of an answer: those of a list, and so many for each byte that was sent."""
SETTLE_SECONDS = 0.1
WARM_UP = 1000
VALID_EVERY = 50
MAX_SHOWN = 30
SCHEMATHESIS_CONFIG = Path(__file__).parent / "hostile" / "schemathesis.toml"
PRELUDE = f"""
import runpy
runpy.run_path({str(Path(__file__).parent / "hostile" / "watched.py")!r})["install"]()
from contextlib import suppress
with suppress(ImportError):
    from boxcal.app.settings import limits
    limits.TIMEOUT_SECONDS = {DEFAULT_SECONDS}
with suppress(ImportError):
    from boxcal.app.http import protocol
    protocol.IDLE_SECONDS = protocol.HEAD_SECONDS = protocol.STALL_SECONDS = {LIMIT_SECONDS}
"""
FAILURES = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS)
"""Status codes of calls that the service did not expect."""
LATE = "Deadline Exceeded"
"""What the client itself says, as the service answers in a sentence."""


class Fuzzer:
    """Sends cases, a few at a time.

    Parameters
    ----------
    document
        The OpenAPI document of the service.
    share
        Of the cases that are drawn from the grammars.

    Attributes
    ----------
    statuses
        How often each status was answered.
    faults
        What the service did wrong, by case.
    """

    def __init__(
        self, service: Service, grpc_port: int, seed: int, document: Mapping[str, Any], share: float
    ) -> None:
        address = httpx.URL(service.url)
        self._address = (address.host, address.port or 0)
        self._grpc_address = f"{address.host}:{grpc_port}"
        self._document = document
        self._cases, self._structured = Cases(seed, document), Structured(seed, document)
        self._share = share
        self._pauses = Path(service.environment[PAUSES])
        self._places = asyncio.Semaphore(CONNECTIONS)
        self._waiting_places = asyncio.Semaphore(WAITING_CONNECTIONS)
        self._sent: list[tuple[float, float, Case | Call]] = []
        self.statuses: Counter[str] = Counter()
        self.largest = 0.0
        self.faults: list[str] = []

    async def run(self, first: int, count: int) -> None:
        """Send `count` cases from the number `first` on."""
        async with grpc.aio.insecure_channel(self._grpc_address) as channel:
            self._channel = channel
            async with asyncio.TaskGroup() as group:
                for number in range(first, first + count):
                    case = self._case(number)
                    waits = isinstance(case, Case) and case.waits
                    places = self._waiting_places if waits else self._places
                    await places.acquire()
                    group.create_task(self._in_place(case, places))
            await self._send_again()

    def _case(self, number: int) -> Case | Call:
        if number % VALID_EVERY == 0:
            return self._cases.valid(number)
        # As many of each kind among any few numbers that follow each other.
        is_structured = int(number * self._share) != int((number + 1) * self._share)
        return (self._structured if is_structured else self._cases).draw(number)

    async def _in_place(self, case: Case | Call, places: asyncio.Semaphore) -> None:
        began = time.monotonic()
        try:
            await self._send(case)
        finally:
            places.release()
            self._sent.append((began, time.monotonic(), case))

    async def _send(self, case: Case | Call) -> None:
        try:
            if isinstance(case, Call):
                size = await self._call(case)
            else:
                answers = await exchange(self._address, case, CLOSE_SECONDS if case.waits else None)
                judge(case, answers, self._document)
                if "valid" in case.name and answers[0].status != httpx.codes.OK:
                    raise Broken(f"{answers[0].status}: {answers[0].body[:300]!r}")
                self.statuses.update(str(answer.status) for answer in answers)
                await self._cancel(answers)
                size = sum(len(answer.body) for answer in answers)
            self.largest = max(self.largest, (size - ANSWER_BYTES) / len(case.data or b"0"))
            if size > ANSWER_BYTES + ANSWER_FACTOR * len(case.data):
                raise Broken(f"{size:,} bytes were answered")
        except (Broken, OSError) as error:
            self.faults.append(
                f"{case.name}: {error}\n    sent {len(case.data):,} bytes: {case.data[:300]!r}"
            )

    async def _call(self, call: Call) -> int:
        """Make a call, and return the bytes of its answer."""
        method = self._channel.unary_unary(f"/inference.GRPCInferenceService/{call.method}")
        try:
            answer: bytes = await method(call.data, timeout=DEFAULT_SECONDS + GRACE_SECONDS)
        except grpc.aio.AioRpcError as error:
            self.statuses[error.code().name] += 1
            is_late = error.details() == LATE
            if is_late or error.code() in FAILURES:
                raise Broken(f"{error.code().name}: {error.details()!r:.300}") from None
            return len(error.details() or "")
        self.statuses["OK"] += 1
        return len(answer)

    async def _send_again(self) -> None:
        """Send what was in progress during a pause of the event loop again, each request alone.

        A pause may belong to several requests together, or to none; one that comes again has its cause.
        """
        sent, self._sent = self._sent, []
        for ended, late, _, _ in self._read_pauses():
            for began, until, case in sent:
                if began < ended and until > ended - late - SETTLE_SECONDS:
                    await asyncio.sleep(SETTLE_SECONDS)
                    self._read_pauses()
                    await self._send(case)
                    await asyncio.sleep(SETTLE_SECONDS)
                    for _, _, seconds, stack in self._read_pauses():
                        self.faults.append(
                            f"{case.name}: the event loop computed for {seconds:.3f} s in {stack:.300}\n"
                            f"    sent {len(case.data):,} bytes: {case.data[:300]!r}"
                        )

    def _read_pauses(self) -> list[tuple[float, float, float, str]]:
        """Return the pauses since the last call: their end, and seconds of wall and processor time."""
        lines = self._pauses.read_text().splitlines() if self._pauses.exists() else []
        self._pauses.write_text("")
        rows = [line.split(maxsplit=3) for line in lines]
        return [(float(ended), float(late), float(seconds), stack) for ended, late, seconds, stack in rows]

    async def _cancel(self, answers: list[Answer]) -> None:
        """Give the places of accepted fits back."""
        for answer in answers:
            if "location" in answer.headers and "/fits/" in answer.headers["location"]:
                head = f"DELETE {answer.headers['location']} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
                await exchange(self._address, Case("cancel", head.encode(), seconds=60))


def fuzz(
    count: int,
    seed: int,
    folder: Path,
    *,
    structured: bool = False,
    postgresql: bool = False,
    source: str = "",
) -> list[str]:
    """Run the fuzzer and schemathesis against a new service; gives what was wrong."""
    with database(folder, postgresql=postgresql) as settings:
        grpc_port = free_port()
        service = Service(
            folder / "data", prelude=PRELUDE, source=source, grpc_port=str(grpc_port), **settings
        )
        service.environment[PAUSES] = str(folder / "pauses")
        with service:
            document = service.client.get("/openapi.json").json()
            fuzzer = Fuzzer(service, grpc_port, seed, document, 1.0 if structured else 0.5)
            with asyncio.Runner() as runner:
                runner.run(fuzzer.run(0, min(WARM_UP, count)))
                before = memory(service)
                began = time.monotonic()
                runner.run(fuzzer.run(WARM_UP, max(0, count - WARM_UP)))
            print(f"{len(fuzzer.faults)} faults after {time.monotonic() - began:.0f} s")
            faults = fuzzer.faults
            if not structured:
                faults += schemathesis(service.url, count, seed)
            seconds = time.monotonic() - began
            faults += remains(service, before)
            print(f"{count:,} cases in {seconds:.0f} s; statuses: {dict(sorted(fuzzer.statuses.items()))}")
            print(f"largest answer: {max(0, fuzzer.largest):.0f} bytes for each byte that was sent")
            if service.stop() != 0:
                faults.append("the service did not end with status 0")
    return faults


@contextmanager
def database(folder: Path, *, postgresql: bool) -> Iterator[dict[str, str]]:
    """Give the settings of the registry, and run its server as long as the block lasts."""
    if not postgresql:
        yield {}
        return
    folder.chmod(0o755)  # the server runs as another user
    (folder / "server").mkdir()
    server = PostgreSQL(folder / "server")
    server.start()
    try:
        yield {"database_url": server.new_database()}
    finally:
        server.stop()


def memory(service: Service) -> int:
    """Let the service give back what it does not use, and return its resident bytes."""
    service.process.send_signal(signal.SIGUSR2)
    time.sleep(1)
    return int(service.process.memory_info().rss)


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


def remains(service: Service, before: int) -> list[str]:
    """Wait for the end of all fits; gives what the service has kept of what it was sent."""
    faults = []
    deadline = time.monotonic() + 120
    while any(fit["state"] in ("queued", "running") for fit in service.client.get("/fits").json()["fits"]):
        if time.monotonic() > deadline:
            faults.append("a fit has not ended")
            break
        time.sleep(0.1)
    growth = memory(service) - before
    print(f"memory: {before / 2**20:.0f} MiB, {growth / 2**20:+.0f} MiB afterwards")
    if growth > MEMORY_BYTES:
        faults.append(f"the memory has grown by {growth:,} bytes")
    (own,) = [path for path in (service.data_dir / "work").iterdir() if path.is_dir()]
    if left := {path.name for path in own.iterdir()} - {".alive", "head.npy"}:
        faults.append(f"left in the work folder: {left}")
    known = {"boxcal.sqlite3", "boxcal.sqlite3-wal", "boxcal.sqlite3-shm", "service.log", "work"}
    known |= {"keys.json", "active.calibrator"}  # copies for outages of PostgreSQL
    if left := {path.name for path in service.data_dir.iterdir()} - known:
        faults.append(f"left in the data folder: {left}")
    if failures := re.findall(r"(?:CRITICAL|ERROR).*|^\w*Error.*", service.log(), re.MULTILINE):
        kinds = Counter(re.sub(r"\d+|\[\w+\]", "N", failure)[:80] for failure in failures)
        faults.append(f"the log has {len(failures)} errors: {kinds.most_common(20)}")
    if "\x1b" in service.log():
        faults.append("the log has control characters")
    return faults


def main() -> int:
    """Run, and give 1 where anything was wrong."""
    parser = argparse.ArgumentParser(description="Send damaged requests to a running service.")
    parser.add_argument("count", type=int, help="cases to send")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--structured", action="store_true", help="draw all cases from the grammars")
    parser.add_argument("--postgresql", action="store_true", help="keep the registry in PostgreSQL")
    parser.add_argument("--source", default="", help="folder of another release to test")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="boxcal-fuzz-") as folder:
        faults = fuzz(
            given.count, given.seed, Path(folder),
            structured=given.structured, postgresql=given.postgresql, source=given.source,
        )  # fmt: skip
    for fault in faults[:MAX_SHOWN]:
        print(fault)
    print(f"{len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
