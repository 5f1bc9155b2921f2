"""Two replicas behind PgBouncer in transaction mode with a pool of 2: `pgbouncer [--calls 10000]`."""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import psycopg

from benchmarks.scaling.peer import DIGITS, FITTED
from benchmarks.scaling.servers import postgresql
from boxcal.app.registry.database import CONNECTIONS
from boxcal.app.registry.records import ActivatePolicy, Decision
from boxcal.app.registry.store import Registry
from tests.app.registry.pgbouncer import pgbouncer


def calls_of(registry: Registry, number: int) -> list[Callable[[], object]]:
    """Return ten calls, three of which write."""
    fits = registry.fits
    name = f"{fits.owner}-{number}"

    def record() -> None:
        fit = fits.start(fits.add(name, "ts", ActivatePolicy.NEVER, 7))
        version, _ = registry.record_fit(fit, FITTED, lambda _: Decision(False, "so"))
        registry.activations.activate(version)

    return [
        record,
        registry.list,
        registry.activations.active,
        registry.glances.look,
        fits.keep_alive,
        fits.cancel_requests,
        lambda: fits.list(20),
        lambda: fits.interrupt_abandoned(set()),
        lambda: fits.adopt(set()),
        lambda: registry.activations.list(10),
    ]


def main(arguments: Sequence[str]) -> None:
    """Call, count the connections meanwhile, and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling pgbouncer", description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    options = parser.parse_args(arguments)
    errors: Counter[str] = Counter()
    done = threading.Event()
    most = 0
    with postgresql() as (server, folder):
        url = server.new_database()
        with pgbouncer(url, folder, pool_size=2) as pooled:
            replicas = [Registry(pooled, DIGITS, owner=name) for name in ("one", "other")]
            for registry in replicas:
                registry.list()

            def work(number: int) -> None:
                for call in calls_of(replicas[number % 2], number):
                    try:
                        call()
                    except Exception as error:
                        errors[repr(error)[:200]] += 1

            def watch() -> None:
                nonlocal most
                clients = "SHOW CLIENTS"
                with psycopg.connect(
                    pooled.rpartition("/")[0] + "/pgbouncer", autocommit=True, prepare_threshold=None
                ) as admin:
                    while not done.wait(0.2):
                        rows = admin.execute(clients.encode(), binary=False).fetchall()
                        most = max(most, sum(row[2] == url.rpartition("/")[2] for row in rows))

            watching = threading.Thread(target=watch)
            watching.start()
            began = time.monotonic()
            # As many threads as a replica has for its registry.
            with ThreadPoolExecutor(CONNECTIONS) as ones, ThreadPoolExecutor(CONNECTIONS) as others:
                pools = (ones, others)
                parts = [pools[number % 2].submit(work, number) for number in range(options.calls // 10)]
                for part in parts:
                    part.result()
            seconds = time.monotonic() - began
            done.set()
            watching.join()
            for registry in replicas:
                registry.close()
    print("| calls | errors | connections of both replicas at most | calls per second |")
    print("| ---: | ---: | ---: | ---: |")
    print(f"| {options.calls} | {sum(errors.values())} | {most} | {options.calls / seconds:.0f} |")
    for error, times in errors.most_common(5):
        print(times, error)
