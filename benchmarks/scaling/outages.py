"""PostgreSQL stopped, killed and hung under load: `outages [--seconds 60] [--rate 200] [--outages hung]`.

Two services with the model `logits:4` share the database. During each outage clients predict at a constant
rate with `timeout_ms: 500`, the routes of the registry are asked, and a fit ends. From the moment when the
database accepts connections again, its own record of that fit is read until it has succeeded; meanwhile the
first 120 requests to the registry are counted, and the other service must follow an activation. Then the
database hangs once more, and one service gets SIGTERM.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import psycopg

from benchmarks.scaling.servers import postgresql, require
from boxcal.app.fitting.server.runner import WAITING
from tests.app.fitting.service import Service
from tests.app.fitting.validation_data import CONTENT_TYPE, form, validation_npz
from tests.app.registry.postgresql import PostgreSQL
from tests.app.steady_load import SteadyLoad

BODY = b'{"logits": [[1.0, 2.0, 3.0, 4.0]], "options": {"timeout_ms": 500}}'
FIRST = 120
REGISTRY_ROUTES = ("/calibrators", "/fits", "/activations")
OUTAGES: dict[str, tuple[Callable[[PostgreSQL], None], Callable[[PostgreSQL], None]]] = {
    "stopped": (lambda one: one.stop(signal.SIGINT), lambda one: one.start()),
    "killed": (lambda one: one.stop(signal.SIGQUIT), lambda one: one.start()),
    "hung": (lambda one: one.pause(), lambda one: one.resume()),
}


def port_of(service: Service) -> int:
    """Port of a service."""
    return int(service.url.rpartition(":")[2])


def submit(service: Service) -> str:
    """Start a fit, and wait until it runs."""
    body = form(validation_npz(4_000, 4), method="auto", activate="never", budget_seconds="3")
    sent = service.client.post("/fit", content=body, headers={"content-type": CONTENT_TYPE})
    require(sent.status_code == 202, sent.text)
    fit_id = str(sent.json()["id"])
    with httpx.stream("GET", f"{service.url}/fits/{fit_id}/events", timeout=280) as events:
        next(line for line in events.iter_lines() if '"state":"running"' in line)
    return fit_id


def ask(service: Service, seconds: float) -> tuple[float, set[int]]:
    """Ask the routes of the registry for so long; gives the slowest answer and the statuses."""
    until, slowest, statuses = time.monotonic() + seconds, 0.0, set()
    while time.monotonic() < until:
        for route in REGISTRY_ROUTES:
            began = time.monotonic()
            statuses.add(httpx.get(f"{service.url}{route}", timeout=60).status_code)
            slowest = max(slowest, time.monotonic() - began)
        time.sleep(2)
    return slowest, statuses


def first_requests(service: Service) -> int:
    """Count failures among the first requests after an outage."""
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(
            lambda number: httpx.get(f"{service.url}{REGISTRY_ROUTES[number % 3]}", timeout=60), range(FIRST)
        )
        return sum(answer.status_code != 200 for answer in answers)


def until(reached: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait, and give the seconds that it took."""
    began = time.monotonic()
    while not reached():
        require(time.monotonic() < began + seconds, what)
        time.sleep(0.02)
    return time.monotonic() - began


def is_recorded(url: str, fit_id: str) -> bool:
    """Ask the database itself whether a fit has succeeded."""
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT state FROM fits WHERE id = %s", [fit_id]).fetchone()
    return row == ("succeeded",)


def row(
    url: str,
    name: str,
    server: PostgreSQL,
    one: Service,
    other: Service,
    *,
    seconds: float,
    rate: float,
    clock: ThreadPoolExecutor,
) -> str:
    """Measure one outage; gives a row of the table."""
    begins, ends = OUTAGES[name]
    fit_id = submit(one)
    lines = len(one.log().splitlines())
    with SteadyLoad(port_of(one), rate, body=BODY) as load:
        time.sleep(1)
        begins(server)
        slowest, statuses = ask(one, seconds)
        waiting = one.client.get(f"/fits/{fit_id}").json()
        require(waiting["stage"] == WAITING, waiting)
        ends(server)
        recorded = clock.submit(until, lambda: is_recorded(url, fit_id), 60, "the fit is not recorded")
    logged = len(one.log().splitlines()) - lines
    time.sleep(0.5)
    failed = first_requests(one)
    version = 1 - other.client.get("/health/ready").json()["calibrator"]
    require(one.client.post(f"/calibrators/{version}/activate").is_success, "not activated")
    followed = until(
        lambda: other.client.get("/health/ready").json()["calibrator"] == version, 60, "not followed"
    )
    shown = " ".join(map(str, sorted(statuses)))
    return (
        f"| {name} | {len(load.seconds)} | {sum(load.failures.values())} | {1000 * max(load.seconds):.0f} | "
        f"{shown} | {slowest:.1f} | {logged} | {failed} | {followed:.1f} | {recorded.result():.1f} |"
    )


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling outages", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--outages", nargs="+", choices=tuple(OUTAGES), default=tuple(OUTAGES))
    options = parser.parse_args(arguments)
    with postgresql() as (server, folder):
        url = server.new_database()
        settings = {"database_url": url, "model": "logits:4"}
        with Service(folder / "one", **settings) as one, Service(folder / "other", **settings) as other:
            body = form(validation_npz(200, 4), method="ts", activate="never")
            first = one.client.post("/fit?wait=280", content=body, headers={"content-type": CONTENT_TYPE})
            require(first.json()["state"] == "succeeded", first.text)
            print(
                "| outage | predictions | failed | slowest, ms | registry routes | slowest, s | log lines | "
                f"of {FIRST} first requests failed | followed, s | fit recorded, s |"
            )
            print("| --- | " + " | ".join(["---:"] * 9) + " |")
            measure = partial(row, seconds=options.seconds, rate=options.rate)
            with ThreadPoolExecutor(1) as clock:
                for name in options.outages:
                    print(measure(url, name, server, one, other, clock=clock), flush=True)
            server.pause()
            time.sleep(5)
            began = time.monotonic()
            status = one.stop()
            print(f"\nSIGTERM while it hangs: status {status} after {time.monotonic() - began:.1f} s")
            server.resume()
