"""The service as a process: it starts, tells when it is ready, and ends without losing a request."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest

from boxcal.app.server import FAILED
from boxcal.models.digits_data import Digits
from tests.app.fitting.files import npy
from tests.app.fitting.service import Service
from tests.app.running import NPY, PNG


def test_sigterm_under_load_loses_no_accepted_request(tmp_path: Path, digits: Digits) -> None:
    with Service(tmp_path) as service:
        answered, refused, lost = [], [], []
        told = threading.Event()

        def client(number: int) -> None:
            with httpx.Client(base_url=service.url, timeout=60) as http:
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
        assert service.stop() == 0
        for thread in clients:
            thread.join(60)
    assert not lost, lost
    assert len(refused) == 12
    assert set(answered) == {200}


def test_what_is_in_work_at_sigterm_is_finished(tmp_path: Path) -> None:
    body = npy(np.zeros((1000, 1, 8, 8), dtype=np.float32))
    with Service(tmp_path, prelude="import triton") as service:  # reports at exit what it has not got back
        answers: list[httpx.Response] = []

        def large() -> None:
            answers.append(httpx.post(f"{service.url}/predict", content=body, headers=NPY, timeout=30))

        thread = threading.Thread(target=large)
        thread.start()
        while "boxcal_queue_samples 1000.0" not in httpx.get(f"{service.url}/metrics").text:
            time.sleep(0.005)
        assert service.stop() == 0
        thread.join(30)
    assert [answer.status_code for answer in answers] == [200]
    assert len(answers[0].json()["predictions"]) == 1000
    assert "Finished server process" in service.log().splitlines()[-1]


def test_a_model_that_is_not_there_stops_the_start_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="'resnet'") as ended, Service(tmp_path, model="resnet"):
        pass
    assert "Traceback" not in str(ended.value)


HURRIED = "from boxcal.app.settings import limits; limits.SHUTDOWN_SECONDS = 3"
HALF_OPEN = (
    b"POST /predict HTTP/1.1\r\nhost: localhost\r\n"
    b"content-type: image/png\r\ncontent-length: 1000\r\n\r\nhalf"
)


def test_half_open_requests_do_not_delay_the_end_and_leave_no_tracebacks(tmp_path: Path) -> None:
    with Service(tmp_path, prelude=HURRIED) as service, ExitStack() as stack:
        address = ("127.0.0.1", httpx.URL(service.url).port or 0)
        lines = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in range(40)]
        for line in lines:
            line.sendall(HALF_OPEN)
        httpx.get(f"{service.url}/health/live")  # the others have been read by now
        began = time.monotonic()
        assert service.stop() == 0
        took = time.monotonic() - began
        answers = {line.recv(1 << 16)[:12] for line in lines}
    assert answers == {b"HTTP/1.1 503"}
    assert took < 30  # without a limit the requests would last for ever
    assert "Traceback" not in service.log()
    assert len(service.log().splitlines()) < 20, service.log()


FAILING = """
from boxcal.app.predict.lanes import BatchSizer
def fail(self, share):
    raise MemoryError("simulated")
BatchSizer.size_of = fail
"""


def test_a_batcher_thread_that_ends_fails_readiness_and_ends_the_process(
    tmp_path: Path, digits: Digits
) -> None:
    with Service(tmp_path, prelude=FAILING) as service:
        answer = httpx.post(f"{service.url}/predict", content=digits.png(0), headers=PNG, timeout=60)
        assert answer.status_code == 500
        assert service.wait() == FAILED
    assert "a thread of the batcher has ended" in service.log()


def test_the_log_has_no_control_characters_of_a_request(tmp_path: Path) -> None:
    with Service(tmp_path, prelude="import boxcal.app.http.health as h; h.Live = None") as service:
        assert httpx.get(f"{service.url}/health/live?%1b[31m").status_code == 500
        assert httpx.get(f"{service.url}/%1b[31mred").status_code == 404
        assert service.stop() == 0
    assert "\x1b" not in service.log()
