"""Predictions while PostgreSQL hangs: what the event loop waits for, not how long the machine takes."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.app.registry.postgresql import PostgreSQL
from tests.app.running import Service, running

pytestmark = pytest.mark.long

BLOCKING = ("sqlalchemy/engine/base.py", "sqlalchemy/pool/", "psycopg/connection.py", "psycopg/cursor.py")
"""Where calls of a database wait that are not asynchronous."""
LOGITS = [[1.0, 2.0, 3.0, 4.0]]
REQUESTS, ASKED = 200, 8


@contextmanager
def watched(thread: int) -> Iterator[set[str]]:
    """Look at what a thread does, a thousand times a second; gives the blocking calls that were seen."""
    seen: set[str] = set()
    looks = 0
    ended = threading.Event()

    def look() -> None:
        nonlocal looks
        while not ended.wait(0.001):
            looks += 1
            stack = traceback.extract_stack(sys._current_frames()[thread])
            for frame in stack:
                if any(part in frame.filename for part in BLOCKING):
                    seen.add(f"{frame.filename}:{frame.lineno} {frame.name}")

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        ended.set()
        watcher.join()
    assert looks > 100


def event_loop_of(service: Service) -> int:
    (thread,) = (one for one in threading.enumerate() if getattr(one, "_target", None) == service.server.run)
    assert thread.ident is not None
    return thread.ident


def test_a_hung_database_holds_up_no_prediction(url: str, postgresql: PostgreSQL, tmp_path: Path) -> None:
    body = {"logits": LOGITS, "options": {"timeout_ms": 500}}
    other = {"logits": LOGITS, "options": {"timeout_ms": 500, "calibrator": 7}}
    with (
        running(tmp_path, database_url=url, model="logits:4") as service,
        ThreadPoolExecutor(ASKED) as pool,
        httpx.Client(base_url=service.url, timeout=60) as client,
    ):
        assert client.post("/calibrate", json=other).status_code == 404
        postgresql.pause()
        try:
            with watched(event_loop_of(service)) as blocking:
                asked = [
                    pool.submit(httpx.get, f"{service.url}/calibrators", timeout=60) for _ in range(ASKED)
                ]
                time.sleep(0.1)
                statuses = {client.post("/calibrate", json=body).status_code for _ in range(REQUESTS)}
                # The registry itself gives up later, and with 503.
                assert client.post("/calibrate", json=other).status_code == 504
                assert not any(answer.done() for answer in asked)
        finally:
            postgresql.resume()
        assert statuses == {200}
        assert not blocking
        assert {answer.result().status_code for answer in asked} <= {200, 503}
