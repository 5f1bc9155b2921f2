"""The service as a process: it starts, tells when it is ready, and ends without losing a request."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from boxcal.app.server import FAILED
from boxcal.models.digits_data import Digits
from tests.app.fitting.files import npy

START = (
    "from boxcal.app.server import serve; from boxcal.app.settings.service import Settings; serve(Settings())"
)
PNG = {"content-type": "image/png"}
NPY = {"content-type": "application/x-npy"}


@dataclass
class Process:
    """A service in a process of its own, and what it has logged."""

    popen: subprocess.Popen[str]
    url: str = ""
    log: list[str] = field(default_factory=list)

    def follow(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self.log.append(line)
            if found := re.search(r"running on (http://[\d.:]+)", line):
                self.url = found[1]


@contextmanager
def started(data_dir: Path, program: str = START, **environment: str) -> Iterator[Process]:
    given = {"BOXCAL_PORT": "0", "BOXCAL_DATA_DIR": str(data_dir), **environment}
    popen = subprocess.Popen(
        [sys.executable, "-c", program], env=os.environ | given, stderr=subprocess.PIPE, text=True
    )
    process = Process(popen)
    reader = threading.Thread(target=process.follow)
    reader.start()
    try:
        deadline = time.monotonic() + 60
        while not process.url:
            assert popen.poll() is None, "".join(process.log)
            assert time.monotonic() < deadline, "".join(process.log)
            time.sleep(0.01)
        yield process
    finally:
        popen.kill()
        popen.wait()
        reader.join()
        if popen.stderr is not None:
            popen.stderr.close()


def test_sigterm_under_load_loses_no_accepted_request(tmp_path: Path, digits: Digits) -> None:
    with started(tmp_path) as process:
        answered, refused, lost = [], [], []
        told = threading.Event()

        def client(number: int) -> None:
            with httpx.Client(base_url=process.url, timeout=60) as http:
                for n in range(100_000):
                    try:
                        response = http.post("/predict", content=digits.png((number + n) % 300), headers=PNG)
                    except httpx.ConnectError as error:
                        refused.append(error)
                        return
                    except httpx.TransportError as error:
                        lost.append(error)
                        return
                    answered.append(response.status_code)
                    if told.is_set() and response.headers.get("connection") == "close":
                        http._transport.close()

        clients = [threading.Thread(target=client, args=(number,)) for number in range(12)]
        for thread in clients:
            thread.start()
        while len(answered) <= 20:
            time.sleep(0.01)
        told.set()
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(60) == 0
        for thread in clients:
            thread.join(60)
    assert not lost, lost
    assert len(refused) == 12
    assert set(answered) == {200}


def test_what_is_in_work_at_sigterm_is_finished(tmp_path: Path) -> None:
    body = npy(np.zeros((1000, 1, 8, 8), dtype=np.float32))
    with started(tmp_path) as process:
        answers: list[httpx.Response] = []

        def large() -> None:
            answers.append(httpx.post(f"{process.url}/predict", content=body, headers=NPY, timeout=30))

        thread = threading.Thread(target=large)
        thread.start()
        while "boxcal_queue_samples 1000.0" not in httpx.get(f"{process.url}/metrics").text:
            time.sleep(0.005)
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(30) == 0
        thread.join(30)
    assert [answer.status_code for answer in answers] == [200]
    assert len(answers[0].json()["predictions"]) == 1000
    assert "Finished server process" in process.log[-1]


def test_a_model_that_is_not_there_stops_the_start_with_its_name(tmp_path: Path) -> None:
    settings = {"BOXCAL_MODEL": "resnet", "BOXCAL_DATA_DIR": str(tmp_path), "BOXCAL_PORT": "0"}
    command = [sys.executable, "-c", START]
    ended = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "'resnet'" in ended.stderr
    assert "Traceback" not in ended.stderr


HURRIED = f"from boxcal.app.settings import limits; limits.SHUTDOWN_SECONDS = 3; {START}"
HALF_OPEN = (
    b"POST /predict HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: image/png\r\ncontent-length: 1000\r\n\r\nhalf"
)


def test_half_open_requests_do_not_delay_the_end_and_leave_no_tracebacks(tmp_path: Path) -> None:
    with started(tmp_path, HURRIED) as process, ExitStack() as stack:
        address = ("127.0.0.1", httpx.URL(process.url).port or 0)
        lines = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(40)]
        for line in lines:
            line.sendall(HALF_OPEN)
        httpx.get(f"{process.url}/health/live")  # the others have been read by now
        process.popen.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.popen.wait(60) == 0
        took = time.monotonic() - began
        answers = {line.recv(1 << 16)[:12] for line in lines}
    assert answers == {b"HTTP/1.1 503"}
    assert took < 30  # without a limit the requests would last for ever
    log = "".join(process.log)
    assert "Traceback" not in log
    assert len(process.log) < 20, log


FAILING = """
from boxcal.app.predict.lanes import BatchSizer
from boxcal.app.server import serve
from boxcal.app.settings.service import Settings
def fail(self, share):
    raise MemoryError("simulated")
BatchSizer.size_of = fail
serve(Settings())
"""


def test_a_batcher_thread_that_ends_fails_readiness_and_ends_the_process(
    tmp_path: Path, digits: Digits
) -> None:
    with started(tmp_path, FAILING) as process:
        answer = httpx.post(f"{process.url}/predict", content=digits.png(0), headers=PNG, timeout=60)
        assert answer.status_code == 500
        assert process.popen.wait(60) == FAILED
    assert "a thread of the batcher has ended" in "".join(process.log)


def test_the_log_has_no_control_characters_of_a_request(tmp_path: Path) -> None:
    broken = START.replace(
        "serve(Settings())", "import boxcal.app.http.health as h; h.Live = None; serve(Settings())"
    )
    with started(tmp_path, broken) as process:
        assert httpx.get(f"{process.url}/health/live?%1b[31m").status_code == 500
        assert httpx.get(f"{process.url}/%1b[31mred").status_code == 404
        process.popen.send_signal(signal.SIGTERM)
        assert process.popen.wait(60) == 0
    assert "\x1b" not in "".join(process.log)
