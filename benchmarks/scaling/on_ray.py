"""Ray Serve on two nodes in a network namespace with the loopback alone: `ray [--parts PART...]`.

`--python` is an interpreter with `boxcal[ray]` (`make ray`). Needs root, PostgreSQL, `unshare` and `ip`.
Requests are calibrations of one row of 10 logits, 60 a second, through HAProxy on the first node.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.scaling.ray_routes import compare
from benchmarks.scaling.servers import postgresql, require, threads_seconds
from benchmarks.scaling.workers import wrk
from boxcal.app.registry.maintenance import migrate
from tests.app.fitting.service import Service
from tests.app.registry.postgresql import PostgreSQL
from tests.app.steady_load import SteadyLoad

ROOT = Path(__file__).parents[2]
SERVE = ROOT / "deploy" / "ray" / "serve.yaml"
INSIDE = "INSIDE_NAMESPACE"
NAMESPACE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
CORES, PORT = 4, 8000
RATE, ROW = 60.0, b'{"logits": [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]}'
DASHBOARD = "http://127.0.0.1:8265"
SERVE_VARIABLES = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "0",
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_SERVE_HAPROXY_NBTHREAD": "1",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "boxcal.app.protocols.ray.asgi:middlewares",
    "RAY_USAGE_STATS_ENABLED": "0",
}
REPLICA = "ray::ServeReplica"
REDEPLOYED = 5000
SETTLED_SECONDS = 3.0
CPU_SECONDS, CPU_ROUNDS = 12.0, 3
PROGRAM = f"wrk.method = 'POST'\nwrk.path = '/calibrate'\nwrk.body = '{ROW.decode()}'\n"
PROGRAM += "wrk.headers['Content-Type'] = 'application/json'\n"
RATES = (60.0, 600.0)
KINDS = {REPLICA: "replicas", "ServeController": "controller"}


class RayCluster:
    """Two nodes, and the application on them.

    Parameters
    ----------
    python
        Interpreter with Ray.
    folder
        For data and the Serve config.
    environment
        Of all processes of the nodes.
    """

    def __init__(self, python: str, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.scaling.ray_nodes", str(CORES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **SERVE_VARIABLES, **environment},
        )
        self.raylet = self._started()

    def deploy(self, replicas: int, **args: Any) -> None:
        """Deploy with `boxcal deploy`, and wait until the proxies know every replica."""
        config = yaml.safe_load(SERVE.read_text())
        config["proxy_location"] = "HeadOnly"  # two cannot listen on one machine
        (application,) = config["applications"]
        application["args"] |= {"data_dir": str(self._folder / "data"), **args}
        application["deployments"][0]["num_replicas"] = replicas
        (file := self._folder / "serve.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-c", "from boxcal.app.cli import main; main()", "deploy", str(file)]
        subprocess.run([*command, "--address", DASHBOARD], check=True, stdout=subprocess.DEVNULL)

    def lose(self) -> None:
        """Kill every process of the second node at once."""
        node = psutil.Process(self.raylet)
        for process in [node, *node.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def again(self) -> None:
        """Start another second node."""
        self._tell("again\n")
        self.raylet = self._started()

    def close(self) -> None:
        """End all."""
        self._tell("end\n")
        self._process.wait()

    def _tell(self, line: str) -> None:
        require(self._process.stdin is not None, self._process)
        if self._process.stdin is not None:
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _started(self) -> int:
        require(self._process.stdout is not None, self._process)
        for line in self._process.stdout or ():
            if line.startswith("node "):
                return int(line.split()[1])
        raise RuntimeError("the nodes did not start")


def replicas() -> list[psutil.Process]:
    """Find the processes of the replicas."""
    return [one for one in psutil.process_iter() if named(one).startswith(REPLICA)]


def named(process: psutil.Process) -> str:
    """Command line of a process, empty where it has just ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def until(reached: Callable[[], bool], seconds: float, what: str) -> float:
    """Wait, and give the seconds that it took."""
    began = time.monotonic()
    while not reached():
        require(time.monotonic() < began + seconds, what)
        time.sleep(0.1)
    return time.monotonic() - began


def serving(count: int) -> bool:
    """Whether so many replicas answer, as the ports of the replicas tell."""
    ready = 0
    for port in range(30_000, 30_012):
        with suppress(httpx.HTTPError):
            ready += httpx.get(f"http://127.0.0.1:{port}/-/healthz", timeout=1).is_success
    return ready == count


@contextmanager
def load() -> Iterator[SteadyLoad]:
    """Send requests at the rate for as long as the block lasts."""
    with SteadyLoad(PORT, RATE, body=ROW, renews=True) as steady:
        time.sleep(SETTLED_SECONDS)
        yield steady
        time.sleep(SETTLED_SECONDS)


def row(name: str, steady: SteadyLoad, event: float | None = None, seconds: float | None = None) -> None:
    """Print what failed, and until when after the event."""
    failed = sum(steady.failures.values())
    late = max(steady.failed_at) - event if steady.failed_at and event is not None else 0.0
    shown = "-" if seconds is None else f"{seconds:.0f}"
    slowest = 1000 * max(steady.seconds)
    print(f"| {name} | {len(steady.seconds) + failed:,} | {failed} | {late:.2f} | {slowest:.0f} | {shown} |")
    if failed:
        print(f"<!-- {dict(steady.failures)} -->")
    sys.stdout.flush()


def routes(cluster: RayCluster, folder: Path, server: PostgreSQL) -> None:
    """Ask every route here and under uvicorn."""
    cluster.deploy(2)
    settings = {"database_url": server.new_database(), "allow_anonymous": "1", "host": "0.0.0.0"}  # noqa: S104
    with Service(folder / "uvicorn", **settings) as service:
        count, asked, missing, differences = compare(service.url, f"http://127.0.0.1:{PORT}")
    print(f"{count} requests to {asked} documented routes (not asked: {sorted(missing)}):")
    print(
        f"{len(differences)} differences from the answers under uvicorn", *differences, sep="\n- ", flush=True
    )


def kill(cluster: RayCluster, *_: object) -> None:
    """Kill a replica of two."""
    cluster.deploy(2)
    for _attempt in range(3):
        until(lambda: serving(2), 120, "two replicas")
        time.sleep(SETTLED_SECONDS)
        with load() as steady:
            moment = time.monotonic()
            replicas()[0].kill()
            time.sleep(10)
        row("`kill -9` of one replica of two", steady, moment)


def lose(cluster: RayCluster, *_: object) -> None:
    """Lose the second node."""
    cluster.deploy(2)
    until(lambda: serving(2), 120, "two replicas")
    time.sleep(SETTLED_SECONDS)
    with load() as steady:
        moment = time.monotonic()
        cluster.lose()
        time.sleep(20)
    row("one node of two lost", steady, moment)
    cluster.again()
    until(lambda: serving(2), 180, "two replicas")


def redeploy(cluster: RayCluster, *_: object) -> None:
    """Replace both replicas."""
    cluster.deploy(2, timeout_ms=30_000)
    until(lambda: serving(2), 180, "two replicas")
    with load() as steady:
        moment = time.monotonic()
        cluster.deploy(2, timeout_ms=29_000)
        seconds = time.monotonic() - moment
        while len(steady.seconds) < REDEPLOYED:
            time.sleep(1)
    row("both replicas replaced", steady, moment, seconds)


def grow(cluster: RayCluster, *_: object) -> None:
    """Grow from one replica to three."""
    cluster.deploy(1)
    until(lambda: serving(1), 180, "one replica")
    time.sleep(SETTLED_SECONDS)
    with load() as steady:
        moment = time.monotonic()
        cluster.deploy(3)
        until(lambda: serving(3), 180, "three replicas")
        seconds = time.monotonic() - moment
    row("1 to 3 replicas", steady, moment, seconds)


def processor_seconds() -> Counter[str]:
    """Processor time by kind of every process here but this one, what it started to load, and PostgreSQL."""
    total = Counter[str]()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and process.name() not in ("postgres", "wrk"):
                total[kind(process)] += threads_seconds(process.pid)  # type: ignore[assignment]
    return total


def kind(process: psutil.Process) -> str:
    """Name what a process is of Ray."""
    line = named(process)
    found = next((kind for word, kind in KINDS.items() if word in line), "others")
    return "HAProxy" if process.name() == "haproxy" else found


def spent(work: Callable[[], float]) -> tuple[float, Counter[str]]:
    """Do something; gives what it returns, and the processor time of the others meanwhile."""
    before = processor_seconds()
    done = work()
    after = processor_seconds()
    return done, Counter({name: after[name] - before[name] for name in after})


def wait() -> float:
    """Send nothing."""
    time.sleep(CPU_SECONDS)
    return 0.0


def steadily(rate: float) -> float:
    """Send requests at a rate; gives how many were answered."""
    with SteadyLoad(PORT, rate, body=ROW, renews=True) as steady:
        time.sleep(CPU_SECONDS)
    require(not steady.failures, steady.failures)
    return len(steady.seconds)


def greedily() -> float:
    """Send the next request after each answer, on 16 connections; gives how many were answered."""
    with tempfile.TemporaryDirectory() as folder:
        (program := Path(folder) / "post.lua").write_text(PROGRAM)
        return wrk(PORT, program, int(CPU_SECONDS), 16) * CPU_SECONDS


def processor(cluster: RayCluster, *_: object) -> None:
    """Measure what each request adds to the processor time that all processes take without requests.

    The time is the scheduler's own count of every thread. In each round, times with requests follow one
    without. Of what each takes more than that, divided by the requests, the medians over the rounds are
    printed.
    """
    cluster.deploy(2)
    until(lambda: serving(2), 180, "two replicas")
    time.sleep(20)
    loads: dict[str, Callable[[], float]] = {f"{rate:,.0f}": partial(steadily, rate) for rate in RATES}
    loads["as many as 16 connections get"] = greedily
    names = ["all", *KINDS.values(), "HAProxy", "others"]
    without: dict[str, list[float]] = {name: [] for name in names}
    more: dict[str, dict[str, list[float]]] = {load: {name: [] for name in names} for load in loads}
    rates: dict[str, list[float]] = {load: [] for load in loads}
    for _round in range(CPU_ROUNDS):
        idle = with_all(spent(wait)[1])
        for name in names:
            without[name].append(100 * idle[name] / CPU_SECONDS)
        for load, sending in loads.items():
            count, loaded = spent(sending)
            rates[load].append(count / CPU_SECONDS)
            seconds = with_all(loaded)
            for name in names:
                more[load][name].append(1000 * (seconds[name] - idle[name]) / count)
    print(f"| processor time | without requests, % of a core | {' | '.join(loads)} |")
    print(f"| --- | ---: |{' ---: |' * len(loads)}")
    print(f"| requests a second | 0 | {' | '.join(f'{median(one):,.0f}' for one in rates.values())} |")
    for name in names:
        each = " | ".join(f"{median(more[load][name]):.2f}" for load in loads)
        print(f"| {name}, ms for each request | {median(without[name]):.2f} | {each} |", flush=True)
    print(f"\nall, of each round: {more['60']['all']}")


def with_all(seconds: Counter[str]) -> Counter[str]:
    """Add the sum of all kinds."""
    return Counter({"all": sum(seconds.values()), **seconds})


PARTS: dict[str, Callable[..., None]] = {
    "routes": routes,
    "kill": kill,
    "lose": lose,
    "redeploy": redeploy,
    "grow": grow,
    "processor": processor,
}
HEADER = "| event | requests | failed | last failure after, s | slowest, ms | event took, s |"


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling ray", description=__doc__)
    parser.add_argument("--python", default=str(ROOT / ".venv-ray" / "bin" / "python"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--proxy", choices=("haproxy", "python"), default="haproxy")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="variables of the nodes")
    options = parser.parse_args(arguments)
    if INSIDE not in os.environ:
        again = [sys.executable, "-m", "benchmarks.scaling", "ray", *arguments]
        shell = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", *again]
        done = subprocess.run([*NAMESPACE, *shell], env={**os.environ, INSIDE: "1"}, check=False)
        sys.exit(done.returncode)
    with postgresql() as (server, folder), ExitStack() as stack:
        url = server.new_database()
        migrate(url)
        environment = {
            "BOXCAL_DATABASE_URL": url,
            "BOXCAL_ALLOW_ANONYMOUS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "RAY_SERVE_ENABLE_HA_PROXY": str(int(options.proxy == "haproxy")),
            **dict(pair.split("=", 1) for pair in options.set),
        }
        cluster = RayCluster(options.python, folder, environment)
        stack.callback(cluster.close)
        print(f"{HEADER}\n| --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
        for part in options.parts:
            PARTS[part](cluster, folder, server)
