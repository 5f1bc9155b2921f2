"""Event streams and connections are limited, so that health checks always find a descriptor."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.app.fitting.service import Service

FEW = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))"
STREAM = b"GET /monitor/events HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip("this process cannot open enough connections")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    folder: Path = tmp_path_factory.mktemp("streams")
    with Service(folder, prelude=FEW, device="cpu") as one:
        yield one
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(service: Service, stack: ExitStack, sent: bytes = b"", host: str = "127.0.0.1") -> socket.socket:
    address = ("127.0.0.1", httpx.URL(service.url).port or 0)
    line = stack.enter_context(socket.create_connection(address, timeout=30, source_address=(host, 0)))
    line.sendall(sent)
    return line


def test_one_client_cannot_use_up_the_descriptors_with_streams(service: Service) -> None:
    with ExitStack() as stack:
        lines = [connect(service, stack, STREAM) for _ in range(1005)]
        heads = [line.recv(4096) for line in lines]
        assert httpx.get(f"{service.url}/health/live", timeout=5).is_success
        opened = [head for head in heads if head.startswith(b"HTTP/1.1 200")]
        refused = [head for head in heads if head.startswith(b"HTTP/1.1 429")]
        assert (len(opened), len(refused)) == (64, 941)
        assert b"retry-after: 10" in refused[0].lower()
        assert b"has 64 event streams open; the limit is 64" in refused[0] + lines[
            heads.index(refused[0])
        ].recv(4096)
    deadline = time.monotonic() + 30
    with ExitStack() as stack:
        while not connect(service, stack, STREAM).recv(4096).startswith(b"HTTP/1.1 200"):
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_connections_that_ask_for_nothing_leave_descriptors_for_health_checks(service: Service) -> None:
    with ExitStack() as stack:
        for _ in range(1005):
            connect(service, stack)
        time.sleep(4)  # those of the reserve must send their request within 2 s
        assert httpx.get(f"{service.url}/health/live", timeout=5).is_success
        refused = httpx.get(f"{service.url}/version", timeout=5)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.json()["type"] == "urn:boxcal:problem:unavailable"
        kept = ExitStack()
        for _ in range(300):
            connect(service, kept, host="127.0.0.2")
        with kept, httpx.Client(transport=httpx.HTTPTransport(local_address="127.0.0.2")) as other:
            assert other.get(f"{service.url}/version", timeout=5).status_code == 200
