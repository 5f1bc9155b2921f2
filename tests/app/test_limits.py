"""Clients that send too much or too slowly, or read too slowly, are limited; others are not affected."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from boxcal.app.http import protocol
from boxcal.models.digits_data import Digits
from tests.app.fitting.files import npy
from tests.app.running import PNG, Service, running
from tests.app.waiting import until


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service that waits a second where others wait much longer."""
    for name in ("IDLE_SECONDS", "HEAD_SECONDS", "STALL_SECONDS"):
        monkeypatch.setattr(protocol, name, 1.0)
    with running(tmp_path) as service:
        yield service


def connect(service: Service) -> socket.socket:
    line = socket.create_connection(("127.0.0.1", httpx.URL(service.url).port or 0), timeout=60)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def read_all(line: socket.socket) -> bytes:
    data = b""
    try:
        while part := line.recv(1 << 16):
            data += part
    except ConnectionResetError:
        pass
    return data


def post(path: str, length: int, headers: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {length}\r\n{headers}\r\n".encode()


def live(service: Service) -> None:
    assert httpx.get(f"{service.url}/health/live", timeout=30).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"POST /pred",
        b"GET / HTTP/1.1\r\nhost: localhost\r\nx-a: ",
        post("/predict", 100, "content-type: image/png\r\n"),
    ],
    ids=["nothing", "request line", "headers", "body"],
)
def test_a_half_open_request_is_closed(quick: Service, sent: bytes) -> None:
    with ExitStack() as stack:
        lines = [stack.enter_context(connect(quick)) for _ in range(50)]
        for line in lines:
            line.sendall(sent)
        answers = {read_all(line) for line in lines}
    live(quick)
    expected = b"HTTP/1.1 408 Request Timeout" if sent else b""
    assert all(answer.startswith(expected) for answer in answers)


def test_what_came_while_the_service_stood_still_is_received(quick: Service) -> None:
    """A client is not slow where the machine is paused, and the server looks before it has read."""

    def pause() -> None:
        time.sleep(2.5)
        with suppress(StopIteration):
            quick.server.on_tick(0).send(None)

    with connect(quick) as line:
        line.sendall(b"GET /health/live HTTP/1.1\r\n")
        until(lambda: len(quick.server.server_state.connections) == 1)
        (connection,) = quick.server.server_state.connections
        connection.loop.call_soon_threadsafe(pause)
        time.sleep(0.5)
        line.sendall(b"host: localhost\r\nconnection: close\r\n\r\n")
        assert read_all(line).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_arrives_byte_by_byte_is_refused(quick: Service) -> None:
    stop = threading.Event()
    with connect(quick) as line:
        line.sendall(post("/predict", 10_000, "content-type: image/png\r\n"))

        def drip() -> None:
            while not stop.wait(0.1):
                try:
                    line.sendall(b"x")
                except OSError:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert read_all(line).startswith(b"HTTP/1.1 408")
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("lines", [1, 100_000])
def test_headers_have_a_limit(service: Service, lines: int) -> None:
    with connect(service) as line:
        head = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\n"
        head += b"".join(b"x-%d: %b\r\n" % (n, b"y" * (2**20 // lines)) for n in range(lines))
        try:
            line.sendall(head)
        except OSError:
            return  # it is closed already
        assert read_all(line).startswith(b"HTTP/1.1 431 ")
    live(service)


@pytest.mark.parametrize("first", [100_000, 30_000, 59_000])
def test_whole_headers_above_the_limit_are_refused_too(service: Service, first: int) -> None:
    """Also where they arrive in two parts, of which each is below the limit."""
    for size, status in ((70_000, 431), (60_000, 200)):
        head = b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += b"x: %b\r\n\r\n" % (b"y" * size)
        with connect(service) as line:
            line.sendall(head[:first])
            if first < size:
                time.sleep(0.2)
            line.sendall(head[first:])
            assert read_all(line).startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    ("hosts", "status"),
    [("", 400), ("host: localhost\r\nhost: localhost\r\n", 400), ("host: localhost\r\n", 200)],
)
def test_a_request_has_one_host(service: Service, hosts: str, status: int) -> None:
    with connect(service) as line:
        line.sendall(f"GET /health/live HTTP/1.1\r\n{hosts}connection: close\r\n\r\n".encode())
        assert read_all(line).startswith(f"HTTP/1.1 {status} ".encode())


def test_http_1_0_needs_no_host(service: Service) -> None:
    with connect(service) as line:
        line.sendall(b"GET /health/live HTTP/1.0\r\n\r\n")
        assert read_all(line).startswith(b"HTTP/1.1 200 ")


def test_head_is_answered_as_get_without_the_body(http: httpx.Client) -> None:
    got, head = http.get("/health/live"), http.head("/health/live")
    assert head.status_code == 200
    assert not head.content
    assert head.headers["content-length"] == got.headers["content-length"]
    assert http.put("/fits/x").headers["allow"] == "DELETE, GET, HEAD"


def test_unfinished_bodies_hold_bounded_memory_and_small_requests_pass(
    service: Service, digits: Digits
) -> None:
    value = service.state.telemetry.registry.get_sample_value
    refused = value("boxcal_rejected_total", {"reason": "queue-full"})
    memory = psutil.Process().memory_info().rss
    chunk = bytes(2**20)
    with ExitStack() as stack:
        for _ in range(40):
            line = stack.enter_context(connect(service))
            line.sendall(post("/predict", 31 * 2**20 + 1, "content-type: image/png\r\n"))
            for _ in range(31):
                line.sendall(chunk)
        assert psutil.Process().memory_info().rss - memory < 700 * 2**20
        assert httpx.post(f"{service.url}/predict", content=digits.png(0), headers=PNG).status_code == 200
        after = value("boxcal_rejected_total", {"reason": "queue-full"})
    assert after is not None
    assert refused is not None
    assert after - refused >= 20


def test_a_response_that_is_not_read_is_dropped(quick: Service) -> None:
    body = npy(np.zeros((20_000, 10), np.float32))
    head = post("/calibrate?probabilities=true", len(body), "content-type: application/x-npy\r\n")
    with connect(quick) as line:
        line.sendall(head + body)
        while not line.recv(1, socket.MSG_PEEK):
            pass
        memory = quick.state.default.pipeline.memory
        while memory.held:
            threading.Event().wait(0.01)
        assert len(read_all(line)) < 10 * 2**20
    live(quick)


def test_the_bodies_of_small_documents_are_small_whether_they_say_so_or_not(http: httpx.Client) -> None:
    for sent in (b" " * 2**16 + b"{}", iter([b" " * 2**16, b"{}"])):
        headers = {"content-type": "application/json"}
        answer = http.post("/monitor/acknowledge", content=sent, headers=headers)
        assert answer.status_code == 413, answer.text
        assert answer.json()["detail"].endswith("the limit is 65,536.")
