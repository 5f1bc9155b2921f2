import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from benchmarks.serving.load import Generator, Outcome, Phase
from benchmarks.serving.payloads import Request

STALL_SECONDS = 0.6


@dataclass
class Server:
    """A real server that answers at once, but for one stall, and with a status of choice."""

    port: int = 0
    stall_at: int | None = None
    refuse_every: int | None = None
    close_every: int | None = None
    chunked: bool = False
    seen: int = 0
    bodies: set[bytes] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, phase: Phase, bodies: tuple[bytes, ...] = (b"one", b"two")) -> Outcome:
        requests = [Request("/", "text/plain", body).encoded(self.port) for body in bodies]
        return Generator(self.port, requests).run(phase)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            self.connection.settimeout(10)

        def do_POST(self) -> None:
            state.bodies.add(self.rfile.read(int(self.headers["Content-Length"])))
            with state.lock:
                state.seen += 1
                number = state.seen
                if number == state.stall_at:
                    time.sleep(STALL_SECONDS)
            if state.close_every and number % state.close_every == 0:
                self.close_connection = True
                return
            self.send_response(503 if state.refuse_every and number % state.refuse_every == 0 else 200)
            if state.chunked:
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(b"4\r\nwell\r\n0\r\n\r\n")
            else:
                self.send_header("Content-Length", "4")
                self.end_headers()
                self.wfile.write(b"well")

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        state.port = http.server_address[1]
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        yield state
        http.shutdown()
        thread.join()


def test_a_constant_rate_is_offered_whole_and_answered(server: Server) -> None:
    outcome = server.run(Phase("rate", seconds=1.0, connections=8, rate=100))
    assert outcome.offered == 100
    assert len(outcome.latencies) == 100
    assert outcome.failures == {}
    assert server.bodies == {b"one", b"two"}


@pytest.mark.parametrize("connections", [1, 8])
def test_a_stall_is_charged_to_every_request_that_was_due_in_it(server: Server, connections: int) -> None:
    server.stall_at = 20
    outcome = server.run(Phase("rate", seconds=1.5, connections=connections, rate=100))
    waited = np.array(outcome.latencies)
    # 60 requests were due during the stall; they waited 0 to 600 ms, whether a connection was free or not.
    assert outcome.offered == len(waited) == 150
    assert waited.max() >= STALL_SECONDS
    assert (waited > STALL_SECONDS / 2).sum() >= 25
    assert (waited > STALL_SECONDS / 10).sum() >= 50


def test_saturation_keeps_every_connection_busy_and_no_more(server: Server) -> None:
    server.stall_at = 1
    outcome = server.run(Phase("saturation", seconds=0.3, connections=4))
    # The request that settles the server stalls before the phase begins; all that was sent is answered.
    assert outcome.offered == len(outcome.latencies) > 4
    assert max(outcome.latencies) < STALL_SECONDS


def test_refusals_and_broken_connections_are_failures_and_not_latencies(server: Server) -> None:
    server.refuse_every, server.close_every = 5, 7
    outcome = server.run(Phase("rate", seconds=0.7, connections=4, rate=100))
    assert set(outcome.failures) == {"503", "ConnectionError"}
    assert {status: len(took) for status, took in outcome.refused.items()} == {"503": outcome.failures["503"]}
    assert len(outcome.latencies) + sum(outcome.failures.values()) == outcome.offered == 70


def test_chunked_answers_are_read_whole(server: Server) -> None:
    server.chunked = True
    outcome = server.run(Phase("lone", seconds=0.2, connections=1))
    assert outcome.failures == {}
    assert outcome.offered == len(outcome.latencies)
