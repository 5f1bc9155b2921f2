import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.serving import report
from benchmarks.serving.load import Generator, Outcome, Phase, _come_due
from benchmarks.serving.payloads import Request, for_boxcal, open_inference, random_logits, read_answer

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


def test_a_schedule_is_offered_whole_however_late_the_machine_is() -> None:
    phase, outcome = Phase("rate", seconds=0.7, connections=4, rate=100), Outcome("rate", 100)
    late = time.perf_counter() - 5.0
    due = list(_come_due(phase, outcome, 4, late, late + phase.seconds))
    assert outcome.offered == len(due) == 70
    assert due[-1] == pytest.approx(late + 0.69)


def test_chunked_answers_are_read_whole(server: Server) -> None:
    server.chunked = True
    outcome = server.run(Phase("lone", seconds=0.2, connections=1))
    assert outcome.failures == {}
    assert outcome.offered == len(outcome.latencies)


MEMORY = {"boxcal": 400 * 2**20, "other": 100 * 2**20}


def one_round(limit: float, ours: int, theirs: int) -> dict[str, Any]:
    def phase(name: str, answered: int, failed: int = 0, rate: float | None = None) -> dict[str, Any]:
        latencies = [0.010] * (answered - 1) + [0.030]
        failures = {"503": failed} if failed else {}
        return {"name": name, "rate": rate, "elapsed": 1.0, "latencies": latencies, "failures": failures}

    def server(answered: int, failed: int) -> dict[str, Any]:
        phases = [phase("lone", 5), phase("saturation", answered, failed)]
        constant = phase("50% of the limit", 4, failed, rate=limit / 2)
        return {"phases": [*phases, constant]}

    servers = {"boxcal": server(ours, 0), "other": server(theirs, 3)}
    return report.condense({"limits": {"limit": limit}, "servers": servers})


def test_the_table_shows_medians_of_shares_taken_within_each_round() -> None:
    rounds = [one_round(100, 90, 50), one_round(50, 48, 40), one_round(200, 100, 20)]
    lines = report.table("images", {"memory_bytes": MEMORY, "rounds": rounds}).splitlines()
    assert "limit 100.0/s" in lines[0]
    ours, theirs = (line.strip("| ").split(" | ") for line in lines[-2:])
    assert ours[:4] == ["**boxcal**", "90.0", "0.900", "0.900, 0.960, 0.500"]
    assert theirs[:4] == ["other", "40.0", "0.500", "0.500, 0.800, 0.100"]
    assert theirs[7:] == ["9", "100"]


def test_the_plot_shows_every_task_measured(tmp_path: Path) -> None:
    results = {"memory_bytes": MEMORY, "rounds": [one_round(100, 90, 50)]}
    (tmp_path / "serving-images.json").write_text(json.dumps(results))
    report.plot(tmp_path, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.startswith("<?xml")
    report.plot(tmp_path / "nowhere", tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()


@pytest.mark.parametrize("shape", [for_boxcal, open_inference])
def test_every_dialect_carries_the_same_logits(shape: Any) -> None:
    (body,) = random_logits(1)
    sent = json.loads(shape("logits", body).body)
    row = sent["logits"][0] if "logits" in sent else sent["inputs"][0]["data"]
    assert row == json.loads(body)["logits"][0]


def test_every_dialect_of_answers_is_read() -> None:
    top = [{"index": i, "probability": 0.1} for i in range(5)]
    assert read_answer("images", {"top": top}) == [0, 1, 2, 3, 4]
    assert read_answer("images", {"predictions": [{"top": top}]}) == [0, 1, 2, 3, 4]
    assert read_answer("images", {"outputs": [{"data": [0, 1, 2, 3, 4]}]}) == [0, 1, 2, 3, 4]
    rows = [[0.5, 0.5]]
    for document in (rows, {"probabilities": rows}, {"predictions": [{"probabilities": rows[0]}]}):
        assert read_answer("logits", document) == [0.5, 0.5]
