"""What breaks first on the way to 1,000 replicas and 100,000 requests a second: `plan [--replicas 1000]`.

Each part simulates its numbers on this machine: connections to one PostgreSQL with and without PgBouncer,
replicas that fetch the same activation, the series of a Prometheus, replicas that share a feedback log, and
replicas that each fold their own feedback and store what came of it, as would be needed beyond (not built).
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import numpy as np
import psutil
import psycopg
import yaml
from scipy.special import softmax

from benchmarks.scaling import followers
from benchmarks.scaling.peer import DIGITS
from benchmarks.scaling.ray_routes import answers
from benchmarks.scaling.servers import postgresql, require
from boxcal.app.monitoring.fold import ActiveVersion, MonitorFold
from boxcal.app.monitoring.log import FeedbackLog
from boxcal.app.monitoring.records import Block, Entries
from boxcal.app.registry.records import BackboneIdentity
from boxcal.app.registry.store import Registry
from boxcal.calibrators.monitoring.stored_logits import pack
from tests.app.fitting.service import Service, free_port
from tests.app.registry.pgbouncer import pgbouncer

PER_REPLICA = 3
POOL = 20
HERD = 100
SCRAPED, SCRAPE_SECONDS, SCRAPES = 100, 15, 4
ANYBODY = {"model": "digits", "device": "cpu", "allow_anonymous": "1", "host": "0.0.0.0"}  # noqa: S104
WRITERS, WRITING_SECONDS = 8, 10.0
ROWS = 100
"""Predictions that a replica with 100 requests a second stores each second."""
LABELS, STATES = 6000, 2000
KEEP = """INSERT INTO folds VALUES (%s, %s) ON CONFLICT (replica) DO UPDATE SET state = excluded.state"""


def connections(replicas: int) -> None:
    """Open as many connections as the replicas would, directly and through PgBouncer."""
    count = PER_REPLICA * replicas
    print("| connections of replicas | accepted | of the database | PgBouncer, MB | to open all, s |")
    print("| --- | ---: | ---: | ---: | ---: |")
    with postgresql() as (server, folder):
        url = server.new_database()
        with ExitStack() as stack:
            accepted = opened(stack, url, count)
        print(f"| {count:,}, directly | {accepted} | {accepted} | - | - |", flush=True)
        with pgbouncer(url, folder, POOL, clients=2 * count) as pooled, ExitStack() as stack:
            began = time.monotonic()
            accepted = opened(stack, pooled, count)
            seconds = time.monotonic() - began
            used = backends(url)
            size = psutil.Process(followers.pgbouncer_pid()).memory_info().rss / 1e6
        print(f"| {count:,}, PgBouncer | {accepted:,} | {used} | {size:.0f} | {seconds:.1f} |\n", flush=True)


def opened(stack: ExitStack, url: str, count: int) -> int:
    """Open connections until one is refused, and ask something on each; gives how many there are."""
    for number in range(count):
        try:
            connection = psycopg.connect(url, autocommit=True, prepare_threshold=None)
        except psycopg.OperationalError:
            return number
        stack.callback(connection.close)
        connection.execute("SELECT 1")
    return count


def backends(url: str) -> int:
    """Count the sessions of clients in the database."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend' "
            "AND pid <> pg_backend_pid()"
        ).fetchone()
    return 0 if row is None else int(row[0])


def herd(replicas: int) -> None:
    """Let all follow an activation by the directory, and a few without it."""
    followers.main(["--count", str(replicas), "--seconds", "20"])
    print(f"\nwithout the directory, {HERD} followers:\n")
    followers.main(["--count", str(HERD), "--seconds", "5", "--no-directory"])
    print()


def series(replicas: int) -> None:
    """Let a Prometheus scrape replicas that were asked for nothing yet, and for every documented route."""
    with (
        tempfile.TemporaryDirectory(prefix="boxcal-series-") as folder,
        Service(Path(folder) / "one", **ANYBODY) as service,
    ):
        bodies = {"at the start": service.client.get("/metrics").content}
        answers(service.url)
        bodies["after requests to every route"] = service.client.get("/metrics").content
    print("| series of a replica | of all | bytes each in Prometheus | cores of Prometheus for all |")
    print("| --- | ---: | ---: | ---: |")
    for title, body in bodies.items():
        count, size, share = scraped(body)
        one, cores = count / SCRAPED, share * replicas / SCRAPED
        print(f"| {one:.0f}, {title} | {replicas * one:,.0f} | {size:,.0f} | {cores:.2f} |", flush=True)
    print(flush=True)


def scraped(body: bytes) -> tuple[int, float, float]:
    """Scrape simulated replicas; gives their series, the memory for each, and the share of a core."""
    with tempfile.TemporaryDirectory(prefix="boxcal-prometheus-") as name, answering(body) as port:
        folder, own = Path(name), free_port()
        targets = [
            {
                "targets": [f"127.0.0.1:{port}"],
                "labels": {"instance": f"replica-{n}", "__metrics_path__": f"/{n}"},
            }
            for n in range(SCRAPED)
        ]
        job = {
            "job_name": "boxcal",
            "static_configs": targets,
        }
        configuration = {"global": {"scrape_interval": f"{SCRAPE_SECONDS}s"}, "scrape_configs": [job]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        command = ["prometheus", f"--config.file={folder}/prometheus.yml"]
        command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{own}"]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
            process = psutil.Process(server.pid)
            time.sleep(3)
            empty = process.memory_info().rss
            time.sleep(SCRAPE_SECONDS)
            before = sum(process.cpu_times()[:2])
            time.sleep(SCRAPES * SCRAPE_SECONDS)
            share = (sum(process.cpu_times()[:2]) - before) / (SCRAPES * SCRAPE_SECONDS)
            status = httpx.get(f"http://127.0.0.1:{own}/api/v1/status/tsdb").json()
            count = int(status["data"]["headStats"]["numSeries"])
            size = (process.memory_info().rss - empty) / count
            server.terminate()
    return count, size, share


@contextmanager
def answering(body: bytes) -> Iterator[int]:
    """Answer every request with the same body; gives the port."""

    class Replica(BaseHTTPRequestHandler):
        """A replica, as far as Prometheus sees it."""

        def do_GET(self) -> None:
            """Answer."""
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Replica) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def feedback(_: int) -> None:
    """Let replicas store blocks of predictions in one log as fast as it takes them."""
    print("| classes | predictions of a block | blocks per second | predictions per second | bytes each |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for classes in (10, 1000):
        for rows in (1, ROWS):
            with postgresql() as (server, _folder):
                rate, size = stored(server.new_database(), classes, rows)
            print(f"| {classes} | {rows} | {rate:,.0f} | {rate * rows:,.0f} | {size:,.0f} |", flush=True)


def stored(url: str, classes: int, rows: int) -> tuple[float, float]:
    """Store blocks from a few replicas; gives blocks per second and bytes per prediction."""
    identity = BackboneIdentity("simulated", DIGITS.fingerprint, tuple(map(str, range(classes))))
    registries = [Registry(url, identity, owner=f"replica-{number}") for number in range(WRITERS)]
    registries[0].list()
    counts = [0] * WRITERS
    until = time.monotonic() + WRITING_SECONDS

    def write(number: int) -> None:
        registry = registries[number]
        log = FeedbackLog(registry.database, registry.backbone_id, 10_000_000)
        logits = np.random.default_rng(number).normal(size=(rows, classes))
        while time.monotonic() < until:
            block = Block(classes, rows)
            block.add(0, logits, time.time())
            log.write([block], [])
            counts[number] += 1

    threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT pg_total_relation_size('feedback_blocks')").fetchone()
    require(row is not None and sum(counts) > 0, counts)
    for registry in registries:
        registry.close()
    return sum(counts) / WRITING_SECONDS, (0 if row is None else row[0]) / (sum(counts) * rows)


def folds(replicas: int) -> None:
    """Let one replica fold what a minute brings, and store as many results as all would."""
    print("| classes | bytes of a result | to fold 6,000 labels, s | to store it, ms | all, a minute |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for classes in (10, 1000):
        folded(classes)  # compiles
        began = time.process_time()
        state = folded(classes).to_bytes()
        seconds = time.process_time() - began
        with (
            postgresql() as (server, _folder),
            psycopg.connect(server.new_database(), autocommit=True) as one,
        ):
            one.execute("CREATE TABLE folds (replica integer PRIMARY KEY, state bytea)")
            before = followers.processor_seconds(server)
            for number in range(STATES):
                one.execute(KEEP, [number % replicas, state])
            each = (followers.processor_seconds(server) - before) / STATES
        share = f"{each * replicas / 60:.1%} of a core, {len(state) * replicas / 60e6:.1f} MB/s"
        print(f"| {classes} | {len(state):,} | {seconds:.2f} | {1000 * each:.2f} | {share} |", flush=True)


def folded(classes: int) -> MonitorFold:
    """Fold the labels that a replica with 100 requests a second gets in a minute, all of them labelled."""
    generator = np.random.default_rng(classes)
    active = ActiveVersion(0, "uncalibrated", 1, None, 0.0, reads_logits=True)
    fold = MonitorFold(classes, lambda _, logits: softmax(logits, axis=1), active, refits=True)
    for start in range(0, LABELS, ROWS):
        logits = pack(generator.normal(size=(ROWS, classes)))
        fold.fold(
            Entries(
                seq=np.arange(start, start + ROWS),
                versions=np.zeros(ROWS, np.int32),
                moments=np.arange(start, start + ROWS, dtype=np.float64),
                logits=logits,
                labels=generator.integers(0, classes, ROWS),
                propensities=np.ones(ROWS),
                are_predictions=np.ones(ROWS, np.bool_),
            )
        )
    return fold


PARTS = {"connections": connections, "herd": herd, "series": series, "feedback": feedback, "folds": folds}


def main(arguments: Sequence[str]) -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling plan", description=__doc__)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args(arguments)
    for part in options.parts:
        print(f"\n{part}\n", flush=True)
        PARTS[part](options.replicas)
