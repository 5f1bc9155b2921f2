"""The supervisor restarts, replaces and ends processes, on their cores; their metrics are added."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from boxcal.app.fitting.server.worker_process import Worker
from boxcal.app.observability.telemetry import Telemetry
from boxcal.app.settings.service import Settings
from boxcal.app.workers import supervisor as workers
from boxcal.app.workers.metrics import SharedMetrics, keep_counts
from boxcal.app.workers.process import Acceptor
from boxcal.app.workers.supervisor import Process, Supervisor
from boxcal.app.workers.table import CLOSED, ProcessTable, share_of_cores

SERVES = """
import sys, time
from pathlib import Path
from boxcal.app.workers.table import ProcessTable
table = ProcessTable(Path(sys.argv[1]), 2)
while True:
    table.write(int(sys.argv[2]), 0)
    time.sleep(0.01)
"""
FAILS = "raise SystemExit(3)"
HANGS = "import signal; signal.signal(signal.SIGTERM, lambda *_: None)" + SERVES.replace(
    "while True:", "if True:"
)
HANGS += "time.sleep(600)"


class Spawned:
    """Starts processes that run a program, and remembers them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = SERVES
        self.processes: list[tuple[int, Process]] = []

    def __call__(self, index: int, row: int) -> Process:
        command = [sys.executable, "-c", self.program, str(self.folder), str(row)]
        process = Process(subprocess.Popen(command), row, time.monotonic())
        self.processes.append((index, process))
        return process

    def serving(self) -> int:
        return sum(process.is_ready and not process.is_dead for _, process in self.processes)


@pytest.fixture
def spawned(tmp_path: Path) -> Iterator[Spawned]:
    one = Spawned(tmp_path)
    yield one
    for _, process in one.processes:
        process.popen.kill()
        process.popen.wait()


def until(supervisor: Supervisor, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while supervisor.tick() and not reached():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def indices(spawned: Spawned) -> list[int]:
    return [index for index, _ in spawned.processes]


def test_one_process_starts_before_the_others_and_a_dead_one_starts_again(
    spawned: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SHORTEST_PAUSE", 0.0)
    supervisor = Supervisor(2, spawned, spawned.folder, 5.0)
    supervisor.tick()
    assert indices(spawned) == [0]
    until(supervisor, lambda: len(spawned.processes) == 2)
    assert spawned.processes[0][1].is_ready
    spawned.processes[1][1].popen.kill()
    until(supervisor, lambda: len(spawned.processes) == 3)
    assert indices(spawned) == [0, 1, 1]
    supervisor.must_stop = True
    until(supervisor, lambda: False)
    assert supervisor.status == 0
    assert all(process.is_dead for _, process in spawned.processes)


def test_a_process_whose_event_loop_hangs_is_killed_and_replaced(spawned: Spawned) -> None:
    supervisor = Supervisor(2, spawned, spawned.folder, 5.0)
    until(supervisor, lambda: spawned.serving() == 2)
    psutil.Process(spawned.processes[1][1].popen.pid).suspend()
    spawned.program = HANGS  # the next one beats once
    began = time.monotonic()
    until(supervisor, lambda: len(spawned.processes) == 3 and spawned.serving() == 2)
    assert time.monotonic() - began < 30
    assert indices(spawned) == [0, 1, 1]
    until(supervisor, lambda: len(spawned.processes) == 4)
    assert spawned.processes[2][1].is_dead


def test_each_process_serves_until_its_successor_does(spawned: Spawned) -> None:
    supervisor = Supervisor(2, spawned, spawned.folder, 5.0)
    until(supervisor, lambda: spawned.serving() == 2)
    supervisor.must_replace = True

    def replaced() -> bool:
        assert spawned.serving() >= 2
        return len(spawned.processes) == 4 and all(one.is_dead for _, one in spawned.processes[:2])

    until(supervisor, replaced)
    assert indices(spawned) == [0, 1, 0, 1]
    spawned.program = FAILS
    supervisor.must_replace = True
    until(supervisor, lambda: len(spawned.processes) == 5 and spawned.processes[4][1].is_dead)
    for _ in range(20):
        supervisor.tick()
    assert (len(spawned.processes), spawned.serving()) == (5, 2)  # the others are kept


def test_processes_replaced_many_times_leave_no_descriptors(spawned: Spawned) -> None:
    supervisor = Supervisor(2, spawned, spawned.folder, 5.0)
    until(supervisor, lambda: spawned.serving() == 2)
    gc.collect()  # else what earlier tests left open may be closed meanwhile
    before = psutil.Process().num_fds()
    for _ in range(3):
        retired = spawned.processes[-1][1]
        supervisor.must_replace = True
        until(supervisor, lambda: retired.is_dead and spawned.serving() == 2)  # noqa: B023 - called at once
    assert len(spawned.processes) == 8
    assert psutil.Process().num_fds() == before


def test_a_service_that_cannot_start_ends_with_its_status(spawned: Spawned) -> None:
    spawned.program = FAILS
    supervisor = Supervisor(2, spawned, spawned.folder, 5.0)
    until(supervisor, lambda: False)
    assert (supervisor.status, len(spawned.processes)) == (3, 1)


def metrics_of(folder: Path, pid: int, count: float, queued: float, silence: float) -> SharedMetrics:
    registry = CollectorRegistry()
    Counter("boxcal_seen", "Seen.", ["kind"], registry=registry).labels("a").inc(count)
    Counter("boxcal_process_restarts", "Restarts.", registry=registry)
    Gauge("boxcal_queue_samples", "Queued.", registry=registry).set(queued)
    Gauge("boxcal_registry_last_contact_seconds", "Silence.", registry=registry).set(silence)
    Gauge("boxcal_expected_accuracy", "Of this process.", registry=registry).set(count)
    one = SharedMetrics(registry, folder)
    one._file = folder / f"{pid}-1.json"
    one.save()
    return one


def test_counters_of_dead_processes_stay_and_their_gauges_go(tmp_path: Path) -> None:
    other = metrics_of(tmp_path, 7, 2, 1, 30)
    mine = metrics_of(tmp_path, os.getpid(), 3, 5, 4)
    for one in (mine, other):
        text = generate_latest(one)
        assert b'boxcal_seen_total{kind="a"} 5.0' in text
        assert b"boxcal_queue_samples 6.0" in text
        assert b"boxcal_registry_last_contact_seconds 30.0" in text  # the longest of all
        assert b"boxcal_process_restarts_total 0.0" in text
    assert b"boxcal_expected_accuracy 3.0" in generate_latest(mine)
    left = (tmp_path / "7-1.json").read_bytes()
    keep_counts(tmp_path, 7, restarts=1)
    for still_there in (False, True):
        if still_there:  # a reader may find a file that was added to the others at that moment
            (tmp_path / "7-1.json").write_bytes(left)
        text = generate_latest(mine)
        assert b'boxcal_seen_total{kind="a"} 5.0' in text
        assert b"boxcal_queue_samples 5.0" in text
        assert b"boxcal_registry_last_contact_seconds 4.0" in text
        assert b"boxcal_process_restarts_total 1.0" in text


def test_the_expected_accuracy_is_that_of_the_predictions_of_all_processes(tmp_path: Path) -> None:
    processes = [Telemetry({}) for _ in range(2)]
    shared = [SharedMetrics(one.registry, tmp_path) for one in processes]
    for count, confidence, expected in ((0, 0.5, "NaN"), (100, 0.75, "0.75"), (300, 0.25, "0.375")):
        if count:
            processes[count > 100].answered(np.full(count, confidence), 0, 0, 0)
        for one in shared:
            one.save()
        for one in shared:
            assert f"\nboxcal_expected_accuracy {expected}\n".encode() in generate_latest(one)


class Taken(asyncio.Protocol):
    """A connection that was accepted, as uvicorn makes its protocols."""

    def __init__(self, config: Any, server_state: Any, app_state: Any) -> None:
        self.connections = server_state.connections
        self.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.connections.discard(self)


@pytest.mark.anyio
async def test_connections_that_arrive_together_are_shared_and_the_last_are_accepted(tmp_path: Path) -> None:
    """A process that is behind, but does not accept, loses a connection within 20 ms."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    listeners = [listener, listener.dup()]
    tables = [ProcessTable(tmp_path, 2) for _ in range(2)]
    assert tables[0].fewest_connections(0) == CLOSED
    servers = [
        SimpleNamespace(
            config=SimpleNamespace(http_protocol_class=Taken, ssl=None),
            server_state=SimpleNamespace(connections=set()),
            lifespan=SimpleNamespace(state={}),
        )
        for _ in range(2)
    ]

    def counts() -> list[int]:
        return [len(server.server_state.connections) for server in servers]

    async def reached(count: int) -> None:
        async with asyncio.timeout(30):
            while sum(counts()) < count:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)

    acceptors = [
        Acceptor(listeners[index], cast("Any", servers[index]), tables[index], index) for index in range(2)
    ]
    clients = [await asyncio.open_connection(*address) for _ in range(16)]
    await reached(16)
    assert min(counts()) >= 6
    await acceptors[0].close()
    tables[0].write(0, 0)  # it accepts no more
    clients.append(await asyncio.open_connection(*address))
    await reached(17)
    for _ in range(4):
        (late := socket.socket()).connect(address)
        clients.append(await asyncio.open_connection(sock=late))
    await acceptors[1].close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(*address)
    await reached(21)
    for _, writer in clients:
        writer.close()
        await writer.wait_closed()


def test_options_reach_the_processes(tmp_path: Path) -> None:
    given = workers.environment(Settings(data_dir=tmp_path, alarm_webhook=None, model="logits:3"))
    assert (given["BOXCAL_MODEL"], given["BOXCAL_DATA_DIR"]) == ("logits:3", str(tmp_path))
    with workers.open_listener(Settings(host=f"unix:{tmp_path}/socket")) as opened:
        assert opened.getsockname() == str(tmp_path / "socket")


def test_only_a_socket_is_replaced_and_only_the_own_one_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    settings = Settings(host=f"unix:{path}")
    path.write_text("notes")
    with pytest.raises(
        FileExistsError, match="is no socket; move it away, or name another path in BOXCAL_HOST"
    ):
        workers.open_listener(settings)
    assert path.read_text() == "notes"
    path.unlink()
    with workers.open_listener(settings):
        own = workers.identity(path)
    with workers.open_listener(settings):
        workers.remove(path, own)
        assert path.is_socket()
        workers.remove(path, workers.identity(path))
        assert not path.exists()
        workers.remove(path, own)


PROGRAM = """
import os
from boxcal.app.workers.table import take_share_of_cores
before = take_share_of_cores(0, len(os.sched_getaffinity(0)))
assert before is not None
print(len(before), len(os.sched_getaffinity(0)))
"""


def test_cores_that_divide_equally_are_shared_and_others_are_not() -> None:
    assert [share_of_cores({4, 5, 6, 7}, index, 2) for index in (0, 1)] == [{4, 5}, {6, 7}]
    assert share_of_cores({0, 1, 2}, 1, 2) == {0, 1, 2}
    assert share_of_cores({0, 1}, 3, 4) == {0, 1}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no such limit")
def test_a_process_restricts_itself_and_tells_what_it_had() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    assert done.stdout.split() == [str(len(os.sched_getaffinity(0))), "1"]


@pytest.mark.anyio
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no such limit")
async def test_a_fit_runs_on_the_cores_of_the_service() -> None:
    (core, *_) = os.sched_getaffinity(0)
    worker = Worker(60.0, {core})
    await worker._started()
    try:
        assert worker._process is not None
        assert os.sched_getaffinity(worker._process.pid) == {core}
    finally:
        await worker.close()
