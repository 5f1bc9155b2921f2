"""Faults of real serving processes: a stop with open connections, hanging event loops, many replacements."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest

from tests.app.fitting.service import Service
from tests.app.workers.test_service import processes, ready, wait

HALF = (
    b"POST /calibrate HTTP/1.1\r\nhost: localhost\r\n"
    b'content-type: application/json\r\ncontent-length: 20\r\n\r\n{"logits":'
)
HANG = "import signal, sys\nsignal.signal(signal.SIGUSR2, lambda *_: exec('while True: pass'))\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder: Path = tmp_path_factory.mktemp("faults")
    (folder / "sitecustomize.py").write_text(HANG)  # a signal that stops the event loop, not the threads
    one = Service(folder, workers="2", model="logits:3")
    one.environment["PYTHONPATH"] = os.pathsep.join([str(folder), one.environment.get("PYTHONPATH", "")])
    with one:
        wait(lambda: len(ready(one)) == 2)
        yield one


def metric(service: Service, name: str) -> float:
    text = service.client.get("/metrics", headers={"connection": "close"}).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name} "))


@pytest.mark.parametrize(
    "fault",
    [
        *(pytest.param(hangs, marks=pytest.mark.long) for hangs in (signal.SIGSTOP, signal.SIGUSR2)),
        signal.SIGKILL,
    ],
)
def test_a_process_that_stops_hangs_or_dies_is_replaced(service: Service, fault: signal.Signals) -> None:
    started, restarts = len(ready(service)), metric(service, "boxcal_process_restarts_total")
    hung, ended = service.log().count("hangs for 6 s"), service.log().count("it starts again")
    began = time.monotonic()
    processes(service)[-1].send_signal(fault)
    wait(lambda: service.log().count("it starts again") == ended + 1)
    assert time.monotonic() - began < 20  # the next one then takes as long as any start
    wait(lambda: len(ready(service)) == started + 1)
    assert service.log().count("hangs for 6 s") - hung == (fault is not signal.SIGKILL)
    wait(lambda: metric(service, "boxcal_process_restarts_total") > restarts)


def test_after_sigterm_connections_are_refused_at_once_and_waiting_ones_answered(service: Service) -> None:
    address = ("127.0.0.1", httpx.URL(service.url).port or 0)
    with ExitStack() as stack:
        busy = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(6)]
        for line in busy:
            line.sendall(HALF)  # keeps every process until its limit
        time.sleep(0.5)
        service.process.send_signal(signal.SIGTERM)
        outcomes = []
        deadline = time.monotonic() + 3.0
        while time.monotonic() < deadline:
            began = time.monotonic()
            try:
                httpx.get(f"{service.url}/version", timeout=5)
                outcomes.append("answered")
            except httpx.ConnectError:
                outcomes.append("refused")
            except httpx.TransportError as error:
                outcomes.append(repr(error))
            assert time.monotonic() - began < 3.0, outcomes  # one that is taken and not answered takes 5
            time.sleep(0.01)
        assert psutil.pid_exists(service.process.pid)
        assert set(outcomes[-5:]) == {"refused"}
        assert set(outcomes) <= {"answered", "refused"}
        for line in busy:
            line.sendall(b"[[1,2,3]]}")
        assert {line.recv(12) for line in busy} == {b"HTTP/1.1 200"}
        assert service.wait() == 0


def test_a_hangup_at_the_start_waits_for_who_answers_it(tmp_path: Path) -> None:
    held = "from boxcal.app.cli.quick_start import hold_hangup; hold_hangup(); import os"
    code = f"{held}; os.kill(os.getpid(), 1); print('alive')"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"alive\n"
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # as a process has it after that
    one = Service(tmp_path, workers="2", model="logits:3")
    try:
        starting = threading.Thread(target=one.start)
        starting.start()
        wait(lambda: one._process is not None)
        one.process.send_signal(signal.SIGHUP)
        starting.join()
        wait(lambda: "was replaced by" in one.log())
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        one.__exit__(None, None, None)
