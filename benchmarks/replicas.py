"""How fast replicas on PostgreSQL follow an activation, and cancel and continue the fits of each other.

`python -m benchmarks.replicas [--changes 200] [--cancels 20] [--kills 20]`

It starts a private PostgreSQL server and two services with the model `digits` (Debian's package `postgresql`
must be installed). The time of an activation is from the answer of one replica to the first answer of the
other that names the new version. The time of a cancelled fit is from `DELETE` at the other replica to the
moment when the fit reads cancelled and its worker no longer uses the processor. The time of a kill is from
`kill -9` of the replica that runs a fit to the end of that fit in the other one. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import numpy as np
import psutil

from tests.app.fitting.service import Service
from tests.app.fitting.validation_data import CONTENT_TYPE, form, validation_npz
from tests.app.registry.postgresql import PostgreSQL
from tests.app.steady_load import SteadyLoad

SAMPLES = 5000
LONG_SAMPLES = 20_000
BUSY_SECONDS = 0.1
POLL_ONLY = "from boxcal.app.registry.database import Database; Database.notify = lambda *_: None"
"""Run before a service: activations are not notified."""
VARIANTS = (
    ("activation, notified", "", 0.0),
    ("activation, notified, at 100 predictions per second", "", 100.0),
    ("activation, by poll", POLL_ONLY, 0.0),
)
CANCELLED = (("fit cancelled, notified", ""), ("fit cancelled, by poll", POLL_ONLY))
BODY = json.dumps({"logits": [list(range(10))]}).encode()


def activations(
    stack: ExitStack, server: PostgreSQL, folder: Path, changes: int, *, prelude: str, rate: float
) -> list[float]:
    """Return the seconds that a replica takes to follow each of the changes of another one.

    With a rate, it predicts meanwhile; no prediction may fail or name another version than these two.
    """
    settings = {"database_url": server.new_database(), "device": "cpu", "keep_versions": "1000"}
    one, other = (
        stack.enter_context(Service(folder / name, prelude=prelude, **settings)) for name in ("one", "other")
    )
    fitted = one.client.post(
        "/fit?wait=280", content=body(200), headers={"content-type": CONTENT_TYPE}
    ).json()
    require(fitted["state"] == "succeeded", fitted)
    seconds = []
    load = None
    if rate:
        port = int(other.url.rpartition(":")[2])
        load = stack.enter_context(SteadyLoad(port, rate, body=BODY))
    for number in range(changes):
        version = number % 2
        answer = one.client.post(f"/calibrators/{version}/activate")
        began = time.perf_counter()
        require(answer.is_success, answer.text)
        while other.client.get("/health/ready").json()["calibrator"] != version:
            time.sleep(0.005)
        seconds.append(time.perf_counter() - began)
        time.sleep(np.random.default_rng(number).uniform(0, 0.3))  # at any moment of the other's poll
    if load is not None:
        require(not load.failures and set(load.versions) == {"0", "1"}, (load.failures, load.versions))
    return seconds


def cancellations(
    stack: ExitStack, server: PostgreSQL, folder: Path, cancels: int, *, prelude: str
) -> Iterator[float]:
    """Yield the seconds from `DELETE` at one replica to the end of the fit in the other one."""
    settings = {"database_url": server.new_database(), "device": "cpu"}
    one, other = (
        stack.enter_context(Service(folder / name, prelude=prelude, **settings)) for name in ("one", "other")
    )
    upload = form(validation_npz(LONG_SAMPLES), method="auto", activate="never", budget_seconds="120")
    for number in range(cancels):
        sent = one.client.post("/fit", content=upload, headers={"content-type": CONTENT_TYPE}).json()
        path = f"/fits/{sent['id']}"
        with httpx.stream("GET", f"{one.url}{path}/events", timeout=280) as events:
            next(line for line in events.iter_lines() if '"state":"running"' in line)
        time.sleep(np.random.default_rng(number).uniform(2, 4))  # at any moment of the poll
        began = time.perf_counter()
        answer = other.client.delete(path)
        require(answer.is_success and answer.json()["state"] == "cancelled", answer.text)
        while is_busy(one):
            pass
        yield time.perf_counter() - began - BUSY_SECONDS


def is_busy(service: Service) -> bool:
    """Whether the processes that fit use the processor."""
    before = worker_seconds(service)
    time.sleep(BUSY_SECONDS)
    return worker_seconds(service) > before + BUSY_SECONDS / 4


def worker_seconds(service: Service) -> float:
    """Processor time of the processes that a service has started."""
    total = 0.0
    for child in service.process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:2])
    return total


def adoptions(stack: ExitStack, server: PostgreSQL, folder: Path, kills: int) -> Iterator[float]:
    """Yield the seconds from the kill of the owner of a fit to its end elsewhere."""
    url = server.new_database()
    settings = {"database_url": url, "device": "cpu", "shared_dir": str(folder / "shared")}
    one, other = (stack.enter_context(Service(folder / name, **settings)) for name in ("one", "other"))
    for _ in range(kills):
        sent = one.client.post("/fit", content=body(SAMPLES), headers={"content-type": CONTENT_TYPE}).json()
        path = f"/fits/{sent['id']}"
        with httpx.stream("GET", f"{one.url}{path}/events", timeout=280) as events:
            next(line for line in events.iter_lines() if '"state":"running"' in line)
        one.kill()
        began = time.perf_counter()
        with httpx.stream("GET", f"{other.url}{path}/events", timeout=280) as events:
            last = [line for line in events.iter_lines() if line.startswith("data")][-1]
        seconds = time.perf_counter() - began
        state = json.loads(last.removeprefix("data:"))["state"]
        require(state == "succeeded", last)
        yield seconds
        one.start()


def require(condition: bool, found: object) -> None:
    """Stop the benchmark if a service did not do what it should."""
    if not condition:
        raise RuntimeError(f"unexpected: {found}")


def body(samples: int) -> bytes:
    """Return a form with a validation set."""
    return form(validation_npz(samples), method="ts", activate="never")


def row(name: str, seconds: list[float]) -> str:
    """Write one row of the table."""
    median, high = np.quantile(seconds, [0.5, 0.99])
    return f"| {name} | {len(seconds)} | {median:.3f} | {high:.3f} | {max(seconds):.3f} |"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--cancels", type=int, default=20)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    print("| event | times | median, s | p99, s | most, s |\n| --- | ---: | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory(prefix="boxcal-replicas-") as name:
        Path(name).chmod(0o755)
        (folder := Path(name) / "postgresql").mkdir()
        server = PostgreSQL(folder)
        server.start()
        try:
            for title, prelude, rate in VARIANTS if options.changes else ():
                with ExitStack() as stack:
                    place = Path(name) / title
                    seconds = activations(stack, server, place, options.changes, prelude=prelude, rate=rate)
                print(row(title, seconds), flush=True)
            for title, prelude in CANCELLED if options.cancels else ():
                with ExitStack() as stack:
                    place = Path(name) / title
                    seconds = list(cancellations(stack, server, place, options.cancels, prelude=prelude))
                print(row(title, seconds), flush=True)
            if options.kills:
                with ExitStack() as stack:
                    seconds = list(adoptions(stack, server, Path(name) / "adoption", options.kills))
                print(row("fit continued after kill -9", seconds), flush=True)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
