"""Ray Serve on two nodes in a network namespace that has the loopback alone.

`python -m tools.ray.cluster [routes] [kill] [lose]` prints a row for each event. The nodes run in the
environment of `make ray`. Needs root, PostgreSQL, `unshare` and `ip`. Requests are calibrations of one row of
10 logits, 60 a second, through HAProxy on the first node.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from boxcal.app.registry.maintenance import migrate
from tests.app.fitting.service import Service
from tests.app.registry.postgresql import PostgreSQL
from tests.app.steady_load import SteadyLoad
from tools.ray.routes import compare

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
    "RAY_USAGE_STATS_ENABLED": "0",
}
REPLICA = "ray::ServeReplica"
SETTLED_SECONDS = 3.0


class RayCluster:
    """Two nodes, and the application on them; `python` is an interpreter with Ray."""

    def __init__(self, python: str, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [python, "-m", "tools.ray.nodes", str(CORES)],
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
        node = psutil.Process(self.raylet)
        for process in [node, *node.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def again(self) -> None:
        self._tell("again\n")
        self.raylet = self._started()

    def close(self) -> None:
        self._tell("end\n")
        self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def _started(self) -> int:
        assert self._process.stdout is not None
        for line in self._process.stdout:
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
        assert time.monotonic() < began + seconds, what
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
    with SteadyLoad(PORT, RATE, body=ROW, renews=True) as steady:
        time.sleep(SETTLED_SECONDS)
        yield steady
        time.sleep(SETTLED_SECONDS)


def row(name: str, steady: SteadyLoad, event: float) -> None:
    """Print requests, failures, and the seconds from the event to the last failure."""
    failed = sum(steady.failures.values())
    late = max(steady.failed_at) - event if steady.failed_at else 0.0
    print(f"| {name} | {len(steady.seconds) + failed:,} | {failed} | {late:.2f} |", flush=True)


def routes(cluster: RayCluster, folder: Path, server: PostgreSQL) -> None:
    cluster.deploy(2)
    settings = {"database_url": server.new_database(), "allow_anonymous": "1", "host": "0.0.0.0"}  # noqa: S104
    with Service(folder / "uvicorn", **settings) as service:
        count, asked, missing, differences = compare(service.url, f"http://127.0.0.1:{PORT}")
    print(f"{count} requests to {asked} documented routes (not asked: {sorted(missing)}):")
    print(
        f"{len(differences)} differences from the answers under uvicorn", *differences, sep="\n- ", flush=True
    )


def kill(cluster: RayCluster, *_: object) -> None:
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


PARTS: dict[str, Callable[..., None]] = {"routes": routes, "kill": kill, "lose": lose}


@contextmanager
def postgresql() -> Iterator[tuple[PostgreSQL, Path]]:
    """Run a PostgreSQL server until the block ends; gives it and a folder for everything else."""
    with tempfile.TemporaryDirectory(prefix="boxcal-ray-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (own := folder / "postgresql").mkdir()
        server = PostgreSQL(own)
        server.start()
        try:
            yield server, folder
        finally:
            server.stop()


def main(parts: Sequence[str]) -> None:
    """Run the parts in a network namespace of their own, and print a row for each event."""
    if INSIDE not in os.environ:
        again = [sys.executable, "-m", "tools.ray.cluster", *parts]
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
        }
        cluster = RayCluster(str(ROOT / ".venv-ray" / "bin" / "python"), folder, environment)
        stack.callback(cluster.close)
        for part in parts or PARTS:
            PARTS[part](cluster, folder, server)


if __name__ == "__main__":
    main(sys.argv[1:])
