"""Limits of keys: requests per minute and requests in progress."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest

from boxcal.app.client import BoxcalClient, RetryPolicy, TooManyRequestsError
from boxcal.app.http.limits import Limiter
from boxcal.app.http.problems import RateLimited
from boxcal.app.http.scopes import Scope
from boxcal.app.tables.arrays import write_npy
from tests.app.access.conftest import TESTER, Guarded
from tests.app.raising import raises_problem
from tests.app.running import running
from tests.app.waiting import until

LOGITS = b'{"logits": [[1, 2, 3, 4, 5, 6, 7, 8, 9, 0]]}'


def accepted(url: str, key: str) -> bool:
    return httpx.get(f"{url}/version", headers={"X-API-Key": key}).status_code == 200


def test_requests_per_minute_are_limited_and_counted_in_headers(guarded: Guarded) -> None:
    _, key = guarded.store.create("limited", {Scope.READ}, TESTER, per_minute=3)
    until(lambda: accepted(guarded.url, key))  # the first of three
    with httpx.Client(base_url=guarded.url, headers={"X-API-Key": key}) as http:
        answer = http.get("/stats")
        assert answer.headers["ratelimit-policy"] == '"key";q=3;w=60'
        assert answer.headers["ratelimit"].startswith('"key";r=1;t=')
        assert http.get("/stats").status_code == 200
        refused = http.get("/stats")
        assert refused.status_code == 429
        assert refused.json()["type"] == "urn:boxcal:problem:rate-limited"
        assert "3 requests per minute" in refused.json()["detail"]
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert refused.headers["ratelimit"].startswith('"key";r=0;t=')
    with BoxcalClient(guarded.url, api_key=key, retries=RetryPolicy(retries=0)) as client:
        with pytest.raises(TooManyRequestsError) as error:
            client.stats()
        assert error.value.retry_after is not None
    assert "ratelimit" not in httpx.get(f"{guarded.url}/stats", headers=guarded.headers("read")).headers


def test_a_client_leaves_half_of_the_answers_that_are_not_read(tmp_path: Path) -> None:
    body = b"".join(write_npy(np.zeros((60_000, 10), np.float32)))
    head = "POST /calibrate?probabilities=true&top_k=10 HTTP/1.1\r\nhost: localhost\r\n"
    head += f"content-type: application/x-npy\r\ncontent-length: {len(body)}\r\n\r\n"
    with running(tmp_path, model="logits:10") as service, ExitStack() as stack:
        url = httpx.URL(service.url)

        def asked(host: str) -> bytes:
            line = stack.enter_context(socket.socket())
            line.bind((host, 0))
            line.settimeout(30)
            line.connect((url.host, url.port))
            line.sendall(head.encode() + body)
            return line.recv(10_000)

        admission = service.state.admission
        answers = [asked("127.0.0.1") for _ in range(3)]
        assert admission.unread["127.0.0.1"] // 1000 == 118_440
        assert admission.answers.limit == 268_435_456
        refused = asked("127.0.0.1")
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"has not read 118,440," in refused
        assert [one[:12] for one in (*answers, asked("127.0.0.2"))] == [b"HTTP/1.1 200"] * 4
        stack.close()
        until(lambda: (admission.answers.held, admission.unread) == (0, {}))


def test_requests_in_progress_are_limited(guarded: Guarded) -> None:
    _, key = guarded.store.create("one", {Scope.PREDICT}, TESTER, concurrency=1)
    until(lambda: accepted(guarded.url, key))
    with httpx.Client(base_url=guarded.url, headers={"X-API-Key": key}) as http:
        host, port = guarded.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as first:
            head = f"POST /calibrate HTTP/1.1\r\nHost: {host}\r\nX-API-Key: {key}\r\n"
            first.sendall(
                f"{head}Content-Type: application/json\r\nContent-Length: {len(LOGITS)}\r\n\r\n".encode()
            )
            until(lambda: not accepted(guarded.url, key))
            refused = http.post("/calibrate", content=LOGITS, headers={"Content-Type": "application/json"})
            assert refused.status_code == 429
            assert refused.json()["type"] == "urn:boxcal:problem:concurrency-limited"
            assert refused.headers["retry-after"] == "1"
            first.sendall(LOGITS)
            assert first.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: accepted(guarded.url, key))
        answer = http.post("/calibrate", content=LOGITS, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200


def test_the_bucket_refills_steadily_up_to_the_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("boxcal.app.http.limits.time.monotonic", lambda: now)
    limiter = Limiter(60, None)
    for _ in range(60):
        limiter.enter()
    with raises_problem(RateLimited) as refused:
        limiter.enter()
    assert refused.value.headers["Retry-After"] == "1"
    now = 2.5
    limiter.enter()
    limiter.enter()
    with raises_problem(RateLimited):
        limiter.enter()
    now = 1e6
    limiter.enter()
    assert limiter.headers()[1] == (b"ratelimit", b'"key";r=59;t=1')
