"""Predictions at a constant rate, whatever the service does; what fails or is late is counted."""

from __future__ import annotations

import http.client
import json
import select
import socket
import threading
import time
from collections import Counter
from types import TracebackType
from typing import Self

BODY = b'{"logits": [[1.0, 2.0, 3.0, 4.0]]}'


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed an idle connection."""
    return bool(select.select([connection], [], [], 0)[0])


class SteadyLoad:
    """Sends requests on a fixed schedule from several connections, which may be renewed once closed."""

    def __init__(
        self,
        port: int,
        rate: float,
        *,
        path: str = "/calibrate",
        body: bytes = BODY,
        connections: int = 16,
        renews: bool = False,
    ) -> None:
        self._renews = renews
        self.failed_at: list[float] = []
        self._port, self._path, self._body = port, path, body
        self._period = connections / rate
        self.seconds: list[float] = []
        self.failures: Counter[str] = Counter()
        self.versions: Counter[str] = Counter()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        began = time.monotonic() + 0.1
        self._threads = [
            threading.Thread(target=self._send, args=(began + number / rate,))
            for number in range(connections)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _send(self, due: float) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            if self._renews and connection.sock is not None and is_closed(connection.sock):
                connection.close()
            try:
                connection.request("POST", self._path, self._body, {"Content-Type": "application/json"})
                answer = connection.getresponse()
                document = json.loads(answer.read())
                failure = "" if answer.status == 200 else str(answer.status)
                version = "" if failure else str(document["calibrator"]["version"])
            except (OSError, ValueError, http.client.HTTPException) as error:
                connection.close()
                failure, version = repr(error), ""
            with self._lock:
                if failure:
                    self.failures[failure] += 1
                    self.failed_at.append(time.monotonic())
                else:
                    self.seconds.append(time.monotonic() - due)
                    self.versions[version] += 1
            due = max(due + self._period, time.monotonic() - 1.0)
        connection.close()
