"""The supervisor restarts, replaces and ends processes, and their metrics are added."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from boxcal.app.settings.service import Settings
from boxcal.app.workers import metrics as shared
from boxcal.app.workers import supervisor as workers
from boxcal.app.workers.accepting import Acceptor, Shares
from boxcal.app.workers.metrics import SharedMetrics, join_ended
from boxcal.app.workers.supervisor import Process, Supervisor

SERVES = "import os, sys, time; os.write(int(sys.argv[1]), b'1'); time.sleep(600)"
FAILS = "raise SystemExit(3)"


class Held(asyncio.Protocol):
    """A connection that was taken."""

    def __init__(self) -> None:
        self.lost = asyncio.Event()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.set()


class Spawned:
    """Starts processes that run a program, and remembers them."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.processes: list[tuple[int, Process]] = []

    def __call__(self, index: int) -> Process:
        ready, told = os.pipe()
        os.set_blocking(ready, False)
        popen = subprocess.Popen([sys.executable, "-S", "-c", self.program, str(told)], pass_fds=[told])
        os.close(told)
        process = Process(popen, ready, time.monotonic())
        self.processes.append((index, process))
        return process


@pytest.fixture
def spawned() -> Iterator[Spawned]:
    one = Spawned(SERVES)
    yield one
    for _, process in one.processes:
        process.popen.kill()
        process.popen.wait()
        os.close(process.ready)


def until(supervisor: Supervisor, reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while supervisor.tick() and not reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_one_process_starts_before_the_others_and_a_dead_one_starts_again(
    spawned: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "SHORTEST_PAUSE", 0.0)
    supervisor = Supervisor(2, spawned, 5.0)
    supervisor.tick()
    assert [index for index, _ in spawned.processes] == [0]
    until(supervisor, lambda: len(spawned.processes) == 2)
    assert spawned.processes[0][1].is_ready
    spawned.processes[1][1].popen.kill()
    until(supervisor, lambda: len(spawned.processes) == 3)
    assert [index for index, _ in spawned.processes] == [0, 1, 1]
    supervisor.stop_asked = True
    until(supervisor, lambda: False)
    assert supervisor.status == 0
    assert all(process.is_dead() for _, process in spawned.processes)


def test_each_process_serves_until_its_successor_does(spawned: Spawned) -> None:
    supervisor = Supervisor(2, spawned, 5.0)
    until(supervisor, lambda: len(spawned.processes) == 2 and spawned.processes[1][1].look())
    supervisor.roll_asked = True

    def serving() -> int:
        return sum(process.is_ready and not process.is_dead() for _, process in spawned.processes)

    def replaced() -> bool:
        assert serving() >= 2
        return len(spawned.processes) == 4 and all(one.is_dead() for _, one in spawned.processes[:2])

    until(supervisor, replaced)
    assert [index for index, _ in spawned.processes] == [0, 1, 0, 1]
    spawned.program = FAILS
    supervisor.roll_asked = True
    until(supervisor, lambda: len(spawned.processes) == 5 and spawned.processes[4][1].is_dead())
    for _ in range(20):
        supervisor.tick()
    assert (len(spawned.processes), serving()) == (5, 2)  # the others are kept


def test_a_service_that_cannot_start_ends_with_its_status(spawned: Spawned) -> None:
    spawned.program = FAILS
    supervisor = Supervisor(2, spawned, 5.0)
    until(supervisor, lambda: False)
    assert (supervisor.status, len(spawned.processes)) == (3, 1)


def metrics_of(folder: Path, pid: int, count: float, queued: float) -> SharedMetrics:
    registry = CollectorRegistry()
    Counter("boxcal_seen", "Seen.", ["kind"], registry=registry).labels("a").inc(count)
    Gauge("boxcal_queue_samples", "Queued.", registry=registry).set(queued)
    one = SharedMetrics(registry, folder)
    one._file = folder / f"{pid}.json"
    one.save()
    return one


def test_counters_of_dead_processes_stay_and_their_gauges_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared, "MAX_ENDED", 1)
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as living:
        one = metrics_of(tmp_path, living.pid, 2, 1)
        mine = metrics_of(tmp_path, os.getpid(), 3, 5)
        assert b'boxcal_seen_total{kind="a"} 5.0' in generate_latest(mine)
        assert b"boxcal_queue_samples 6.0" in generate_latest(one)
        living.send_signal(signal.SIGKILL)
        living.wait()
        (tmp_path / "999999998.json").write_bytes((tmp_path / f"{living.pid}.json").read_bytes())
        for _ in range(2):
            text = generate_latest(mine)
            assert b'boxcal_seen_total{kind="a"} 7.0' in text
            assert b"boxcal_queue_samples 5.0" in text
            join_ended(tmp_path)
        assert sorted(file.name for file in tmp_path.glob("*.json")) == sorted(
            [f"{os.getpid()}.json", "ended.json"]
        )


def test_connections_that_arrive_together_are_shared(tmp_path: Path) -> None:
    """One of the processes is asleep at first: the other takes what is not taken within 20 ms."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    listeners = [listener, listener.dup()]
    held: list[list[Held]] = [[], []]

    def taker(index: int, shares: Shares) -> Acceptor:
        def protocol() -> Held:
            held[index].append(Held())
            return held[index][-1]

        return Acceptor(listeners[index], protocol, None, shares, lambda: len(held[index]))

    async def scenario() -> None:
        shares = [Shares(tmp_path, index, 2) for index in range(2)]
        assert not shares[0].is_ahead(5)  # the other does not serve yet
        takers = [taker(index, shares[index]) for index in range(2)]
        clients = [await asyncio.open_connection(*address) for _ in range(16)]
        async with asyncio.timeout(30):
            while sum(map(len, held)) < 16:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        assert min(map(len, held)) >= 6
        takers[0].close()
        shares[0].tell(0)  # a sibling that never takes one
        clients.append(await asyncio.open_connection(*address))
        async with asyncio.timeout(30):
            while sum(map(len, held)) < 17:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.01)
        takers[1].close()
        assert not shares[0].is_ahead(5)
        for _, writer in clients:
            writer.close()
            await writer.wait_closed()
        for protocol in held[0] + held[1]:
            await protocol.lost.wait()

    with listeners[0], listeners[1]:
        asyncio.run(scenario())


def test_options_reach_the_processes(tmp_path: Path) -> None:
    given = workers.environment(Settings(data_dir=tmp_path, alarm_webhook=None, model="logits:3"))
    assert (given["BOXCAL_MODEL"], given["BOXCAL_DATA_DIR"]) == ("logits:3", str(tmp_path))
    with workers.listener(Settings(uds=tmp_path / "socket")) as opened:
        assert opened.getsockname() == str(tmp_path / "socket")
