"""How answers leave: the head with the first of the body, and everything else as it is sent."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from boxcal.app.http.protocol import EXTENSION, BodyParts, LimitedProtocol
from tests.app.running import listening

PAUSE = 0.4
HEAD = b"HTTP/1.1 200 OK"


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer `head`, then, after a pause, `body`; or echo what was posted; or fail between the two."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] != "lifespan.shutdown":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    message = await receive()
    posted = message["body"]
    while scope["path"] == "/echo-all" and message["more_body"]:
        message = await receive()
        posted += message["body"]
    body: bytes | BodyParts = posted or b"body"
    if scope["path"] == "/pieces" and EXTENSION in scope["extensions"]:
        body = BodyParts([b"one", memoryview(b", two")], 8)
    length = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    if scope["path"] == "/fails":
        raise RuntimeError("between head and body")
    if scope["path"] == "/late":
        await asyncio.sleep(PAUSE)
    if scope["path"] == "/streamed":
        await send({"type": "http.response.body", "body": b"fi", "more_body": True})
        await asyncio.sleep(PAUSE)
        await send({"type": "http.response.body", "body": b"rs"})
        return
    await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    config = uvicorn.Config(application, port=0, http=LimitedProtocol, loop="uvloop", log_level="critical")
    with listening(uvicorn.Server(config)) as port:
        yield port


@pytest.fixture
def line(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        yield connection


def ask(path: str, method: str = "GET", headers: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n".encode()


def read_until(line: socket.socket, end: bytes) -> bytes:
    read = b""
    while not read.endswith(end):
        data = line.recv(1 << 16)
        assert data, read
        read += data
    return read


def test_the_head_waits_for_the_body(line: socket.socket) -> None:
    line.sendall(ask("/late"))
    line.settimeout(PAUSE / 2)
    with pytest.raises(TimeoutError):
        line.recv(1)
    line.settimeout(10)
    answer = line.recv(1 << 16)
    assert answer.startswith(HEAD)
    assert answer.endswith(b"\r\n\r\nbody")


def test_a_stream_is_not_held_back_after_its_first_piece(line: socket.socket) -> None:
    line.sendall(ask("/streamed"))
    assert read_until(line, b"fi").startswith(HEAD)
    assert line.recv(2) == b"rs"


def test_a_request_for_the_head_alone_is_answered_and_keeps_its_connection(line: socket.socket) -> None:
    for _ in range(2):
        line.sendall(ask("/", "HEAD"))
        assert read_until(line, b"\r\n\r\n").startswith(HEAD)


def test_a_client_that_waits_to_be_told_to_continue_is_told(line: socket.socket) -> None:
    line.sendall(ask("/", "POST", "content-length: 4\r\nexpect: 100-continue\r\n"))
    assert read_until(line, b"\r\n\r\n").startswith(b"HTTP/1.1 100 ")
    line.sendall(b"sent")
    assert read_until(line, b"sent").startswith(HEAD)


def test_a_body_may_look_like_the_word_to_continue(line: socket.socket) -> None:
    body = b"HTTP/1.1 100 %"
    line.sendall(ask("/echo", "POST", f"content-length: {len(body)}\r\n") + body)
    assert read_until(line, body).startswith(HEAD)


def test_requests_sent_at_once_are_answered_in_their_order(line: socket.socket) -> None:
    posts = [
        ask(path, "POST", "content-length: 4\r\n") + body
        for path, body in (("/late", b"one1"), ("/", b"two2"), ("/", b"tre3"))
    ]
    line.sendall(b"".join(posts))
    answers = read_until(line, b"tre3")
    assert answers.count(HEAD) == 3
    assert answers.index(b"one1") < answers.index(b"two2") < answers.index(b"tre3")


def test_an_answer_that_fails_before_its_body_closes_the_connection(line: socket.socket) -> None:
    line.sendall(ask("/fails"))
    assert line.recv(1 << 16) == b""


def test_a_body_arrives_whole_however_it_is_sent(line: socket.socket) -> None:
    body = bytes(range(256)) * 1200
    line.sendall(ask("/echo-all", "POST", f"content-length: {len(body)}\r\n"))
    for start in range(0, len(body), 70_000):
        line.sendall(body[start : start + 70_000])
    answer = b""
    while len(answer) < len(body):
        answer += line.recv(1 << 16)
    assert answer.endswith(body[-1000:])
    assert answer.partition(b"\r\n\r\n")[2] == body


def test_a_response_of_several_pieces_is_sent_whole(line: socket.socket) -> None:
    line.sendall(ask("/pieces"))
    assert read_until(line, b"two").endswith(b"\r\n\r\none, two")
    line.sendall(ask("/pieces", "HEAD"))
    assert read_until(line, b"\r\n\r\n").startswith(HEAD)


def test_a_body_of_many_small_chunks_is_refused_while_it_is_sent(line: socket.socket) -> None:
    line.sendall(ask("/echo-all", "POST", "transfer-encoding: chunked\r\n") + b"1\r\na\r\n" * 4096)
    line.sendall(b"1\r\na\r\n")
    answer = line.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 400 Bad Request")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert "256 bytes on average" in json.loads(body)["detail"]


@pytest.mark.parametrize(("chunks", "size"), [(4095, 1), (6000, 256)])
def test_a_body_of_few_or_larger_chunks_is_read(line: socket.socket, chunks: int, size: int) -> None:
    head = ask("/echo-all", "POST", "transfer-encoding: chunked\r\n")
    line.sendall(head + b"%x\r\n%s\r\n" % (size, b"a" * size) * chunks + b"0\r\n\r\n")
    assert read_until(line, b"a" * chunks * size).startswith(HEAD)
