"""The load generator: one process with one thread and plain sockets, to use little CPU time.

    python -m benchmarks.serving.load PLAN.json RESULT.json

A plan contains a port, the requests in base64, and phases. A phase without a rate keeps every connection busy
(saturation, or a single client). A phase with a rate sends on a fixed schedule, independent of earlier
responses, and measures latency from the scheduled time, which avoids coordinated omission.
"""

from __future__ import annotations

import base64
import json
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

DRAIN_SECONDS = 2.0
OK = 200


@dataclass(frozen=True)
class Phase:
    """One phase of load; `rate` in requests/s, or None to keep all connections busy."""

    name: str
    seconds: float
    connections: int
    rate: float | None = None


@dataclass
class Outcome:
    """The results. Latencies in seconds, of successful requests only; all others are failures.

    `refused` has the latencies of the failures that have a status, by status.
    """

    name: str
    rate: float | None
    offered: int = 0
    elapsed: float = 0.0
    latencies: list[float] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)
    refused: dict[str, list[float]] = field(default_factory=dict)

    @property
    def throughput(self) -> float:
        return len(self.latencies) / self.elapsed

    def fail(self, reason: str, count: int = 1) -> None:
        """Count a request without a successful response."""
        self.failures[reason] = self.failures.get(reason, 0) + count

    def answered(self, status: int, seconds: float) -> None:
        """Count a request with a successful response."""
        if status == OK:
            self.latencies.append(seconds)
            return
        self.fail(str(status))
        self.refused.setdefault(str(status), []).append(seconds)


class Connection:
    """One open connection that carries one request at a time."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.due = 0.0
        self._received = bytearray()
        self._expected = -1

    def send(self, request: bytes, due: float) -> None:
        self.due = due
        self._received.clear()
        self._expected = -1
        self.socket.sendall(request)

    def receive(self) -> int | None:
        """Read available bytes; return the status when the response is complete."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise ConnectionError("closed")
        self._received += data
        if self._expected < 0:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return None
            head = bytes(self._received[:end]).lower()
            length = head.find(b"content-length:")
            if length < 0:
                return int(head[9:12]) if self._received.endswith(b"0\r\n\r\n") else None
            self._expected = end + 4 + int(head[length + 15 :].split(b"\r\n", 1)[0])
        return int(self._received[9:12]) if len(self._received) >= self._expected else None


class Generator:
    """Runs phases against one port; the requests are sent cyclically."""

    def __init__(self, port: int, requests: list[bytes]) -> None:
        self._port = port
        self._requests = requests
        self._next = 0

    def run(self, phase: Phase) -> Outcome:
        outcome = Outcome(phase.name, phase.rate)
        waiting: deque[float] = deque()
        with select.epoll() as poller:
            self._settle()
            pool = Pool(self._port, phase.connections, poller)
            start = last = time.perf_counter()
            stop = start + phase.seconds
            while True:
                now = time.perf_counter()
                waiting.extend(_come_due(phase, outcome, len(pool.idle) - len(waiting), start, stop))
                if now >= stop and (now > stop + DRAIN_SECONDS or not (pool.busy or waiting)):
                    break
                while waiting and pool.idle:
                    pool.send(self._request(), waiting.popleft())
                # epoll has a resolution of milliseconds; select on its descriptor has microseconds.
                if not select.select([poller], [], [], _pause(phase, outcome, start, stop))[0]:
                    continue
                for descriptor, _ in poller.poll(0):
                    if pool.receive(descriptor, outcome):
                        last = time.perf_counter()
            if pool.busy or waiting:
                outcome.fail("unanswered", len(pool.busy) + len(waiting))
            outcome.elapsed = max(last - start, phase.seconds)
            pool.close()
        return outcome

    def _settle(self) -> None:
        """Wait until the server has finished the requests of an earlier phase."""
        connection = Connection(self._port)
        connection.send(self._request(), 0.0)
        while connection.receive() is None:
            pass
        connection.socket.close()

    def _request(self) -> bytes:
        request = self._requests[self._next % len(self._requests)]
        self._next += 1
        return request


class Pool:
    """The connections of a phase: idle ones, and busy ones by their descriptor."""

    def __init__(self, port: int, count: int, poller: select.epoll) -> None:
        self._port = port
        self._poller = poller
        self.idle: dict[int, Connection] = {}
        self.busy: dict[int, Connection] = {}
        for _ in range(count):
            self._open()

    def _open(self) -> None:
        connection = Connection(self._port)
        self._poller.register(connection.socket.fileno(), select.EPOLLIN)
        self.idle[connection.socket.fileno()] = connection

    def send(self, request: bytes, due: float) -> None:
        descriptor, connection = self.idle.popitem()
        self.busy[descriptor] = connection
        connection.send(request, due)

    def receive(self, descriptor: int, outcome: Outcome) -> bool:
        """Read from a connection, count the result; return whether a response is complete."""
        connection = self.busy.get(descriptor) or self.idle[descriptor]
        try:
            status = connection.receive()
        except (OSError, ValueError) as error:
            if descriptor in self.busy:
                outcome.fail(type(error).__name__)
            self._poller.unregister(descriptor)
            self.busy.pop(descriptor, None)
            self.idle.pop(descriptor, None)
            connection.socket.close()
            self._open()
            return False
        if status is None:
            return False
        outcome.answered(status, time.perf_counter() - connection.due)
        self.idle[descriptor] = self.busy.pop(descriptor)
        return True

    def close(self) -> None:
        for connection in [*self.idle.values(), *self.busy.values()]:
            connection.socket.close()


def _come_due(phase: Phase, outcome: Outcome, free: int, start: float, stop: float) -> Iterator[float]:
    """Yield the times of new requests: at once for every free connection, or by the schedule.

    What a schedule has before `stop` is due however late this is asked.
    """
    now = time.perf_counter()
    if phase.rate is None:
        if now < stop:
            outcome.offered += free
            yield from [now] * free
        return
    while (due := start + outcome.offered / phase.rate) <= now and due < stop:
        outcome.offered += 1
        yield due


def _pause(phase: Phase, outcome: Outcome, start: float, stop: float) -> float:
    now = time.perf_counter()
    if phase.rate is None or now >= stop:
        return 0.05
    return max(0.0, min(start + outcome.offered / phase.rate, stop) - now)


def main(plan: Path, result: Path) -> None:
    asked = json.loads(plan.read_text())
    requests = [base64.b64decode(request) for request in asked["requests"]]
    generator = Generator(asked["port"], requests)
    result.write_text(json.dumps([asdict(generator.run(Phase(**phase))) for phase in asked["phases"]]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
