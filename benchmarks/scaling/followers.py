"""Simulated followers on one PostgreSQL behind PgBouncer: `followers [--count 1000] [--seconds 60]`.

Each follower is a `Registry` that looks every two seconds, as a replica does, and fetches the calibrator of a
new activation. Printed are the processor time of PostgreSQL while nothing changes, and how long a calibrator
of 8 MB takes to reach all of them by the directory that they share.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import psycopg

from benchmarks.scaling.peer import DIGITS, FITTED
from benchmarks.scaling.servers import postgresql, require
from boxcal.app.registry.artifacts import ArtifactFiles
from boxcal.app.registry.follower import FOLLOW_SECONDS
from boxcal.app.registry.records import ActivatePolicy, Decision
from boxcal.app.registry.store import Registry
from tests.app.registry.pgbouncer import pgbouncer
from tests.app.registry.postgresql import PostgreSQL

ARTIFACT_BYTES = 8 * 2**20
POOL = 20
THREADS = 8


@dataclass(eq=False)
class Follower:
    """One replica, as far as the database sees it."""

    registry: Registry
    due: float
    activation: int = 0
    followed_at: float = 0.0

    def turn(self) -> None:
        """Look, and fetch what was activated."""
        seen = self.registry.glances.look()
        if seen.activation > self.activation:
            active = self.registry.activations.active()
            self.registry.activations.check_belongs(active.version)
            require(len(self.registry.artifact(active.version)) == ARTIFACT_BYTES, active)
            self.activation, self.followed_at = active.id, time.monotonic()


class Followers:
    """Gives every follower its turn every two seconds, from a few threads."""

    def __init__(self, url: str, count: int, files: ArtifactFiles | None) -> None:
        generator = np.random.default_rng(0)
        self.all = [
            Follower(
                Registry(url, DIGITS, owner=f"follower-{number}", files=files),
                time.monotonic() + generator.uniform(0, FOLLOW_SECONDS),
            )
            for number in range(count)
        ]
        self.turns = 0
        self.late = 0.0
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(THREADS)]

    def start(self) -> None:
        """Connect all, then follow."""
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(lambda follower: follower.turn(), self.all))
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop following."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for follower in self.all:
            follower.registry.close()

    def _run(self, number: int) -> None:
        own = sorted(self.all[number::THREADS], key=lambda follower: follower.due)
        now = time.monotonic()
        for follower in own:
            follower.due += max(0.0, now - own[0].due)
        while True:
            for follower in own:
                if self._stop.wait(max(0.0, follower.due - time.monotonic())):
                    return
                follower.turn()
                self.turns += 1
                self.late = max(self.late, time.monotonic() - follower.due)
                follower.due = max(follower.due + FOLLOW_SECONDS, time.monotonic() - FOLLOW_SECONDS)


def processor_seconds(server: PostgreSQL) -> float:
    """Processor time of all processes of the server."""
    return sum(sum(process.cpu_times()[:2]) for process in server.processes() if process.is_running())


def sent_bytes(pooled: str) -> int:
    """Bytes that the database has sent to its clients, as PgBouncer counts."""
    url = f"{pooled.rpartition('/')[0]}/pgbouncer"
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as admin:
        cursor = admin.execute(b"SHOW STATS_TOTALS")
        names = [column.name for column in cursor.description or ()]
        return sum(int(row[names.index("bytes_sent")]) for row in cursor.fetchall())


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling followers", description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--no-directory", action="store_true", help="everyone asks the database")
    options = parser.parse_args(arguments)
    with (
        postgresql() as (server, folder),
        pgbouncer(server.new_database(), folder, pool_size=POOL, clients=2 * options.count) as pooled,
    ):
        files = None if options.no_directory else ArtifactFiles(Path(folder) / "artifacts")
        leader = Registry(pooled, DIGITS, owner="leader", files=files)
        followers = Followers(pooled, options.count, files)
        followers.start()
        time.sleep(5)
        before, turns, began = processor_seconds(server), followers.turns, time.monotonic()
        bouncer = psutil.Process(pgbouncer_pid())
        pooling = sum(bouncer.cpu_times()[:2])
        time.sleep(options.seconds)
        elapsed = time.monotonic() - began
        share = (processor_seconds(server) - before) / elapsed
        pooling = (sum(bouncer.cpu_times()[:2]) - pooling) / elapsed
        rate, late = (followers.turns - turns) / elapsed, followers.late
        print("| followers | looks per second | latest look, s | core, PostgreSQL | core, PgBouncer |")
        print("| ---: | ---: | ---: | ---: | ---: |")
        print(f"| {options.count} | {rate:.0f} | {late:.2f} | {share:.1%} | {pooling:.1%} |\n", flush=True)

        sent = sent_bytes(pooled)
        fit = leader.fits.start(leader.fits.add("large", "ts", ActivatePolicy.ALWAYS, 7))
        large = replace(FITTED, artifact=np.random.default_rng(1).bytes(ARTIFACT_BYTES))
        _, activation = leader.record_fit(fit, large, lambda _: Decision(True, "so"))
        began = time.monotonic()
        require(activation is not None, "not activated")
        while any(follower.followed_at == 0.0 for follower in followers.all):
            require(time.monotonic() < began + 300, "not followed")
            time.sleep(0.05)
        seconds = max(follower.followed_at for follower in followers.all) - began
        rate = (sent_bytes(pooled) - sent) / max(seconds, 1e-9)
        print("| calibrator | reaches all in, s | from the database, MB/s |\n| ---: | ---: | ---: |")
        print(f"| {ARTIFACT_BYTES / 2**20:.0f} MB | {seconds:.2f} | {rate / 1e6:.1f} |")
        followers.close()
        leader.close()


def pgbouncer_pid() -> int:
    """Find the PgBouncer that this process started."""
    return next(child.pid for child in psutil.Process().children() if child.name() == "pgbouncer")
