"""One round: the limit, then every contestant in turn, each started, checked, put under load and ended."""

from __future__ import annotations

import base64
import http.client
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.contestants import Contestant, Model, Task
from benchmarks.serving.environments import python_of
from benchmarks.serving.load import Phase
from benchmarks.serving.payloads import Request, read_answer
from benchmarks.serving.running import Server, run_part, serving

FRACTIONS: dict[Task, tuple[float, ...]] = {"images": (0.5, 0.75, 0.9), "logits": (0.05, 0.15, 0.3)}
"""Of the limit: the constant rates. With logits the protocol costs more than the work: none comes near it."""
SATURATING = 16
"""Connections that are always busy at saturation."""
CONNECTIONS = 128
"""Connections for a constant rate; a request that finds none free waits, and its wait is counted."""


@dataclass(frozen=True)
class Setting:
    """What stays the same over all rounds of a task."""

    task: Task
    model: Model
    bodies: list[bytes]
    reference: list[list[float]]
    seconds: float
    scratch: Path


def phases(task: Task, limit: float, seconds: float) -> list[Phase]:
    """Return the load that every contestant meets: warm-up, lone client, saturation, constant rates."""
    return [
        Phase("warm-up", 1.0, SATURATING),
        Phase("lone", 0.5 * seconds, 1),
        Phase("saturation", 1.25 * seconds, SATURATING),
        *(
            Phase(f"{fraction:.0%} of the limit", seconds, CONNECTIONS, fraction * limit)
            for fraction in FRACTIONS[task]
        ),
    ]


def _encoded(bodies: list[bytes]) -> list[str]:
    return [base64.b64encode(body).decode() for body in bodies]


def measure_limits(setting: Setting) -> dict[str, float]:
    """Measure the loops without a server."""
    plan = {"model": str(setting.model.path), "bodies": _encoded(setting.bodies)}
    limits: dict[str, float] = run_part("limits", setting.task, str(setting.seconds), plan=plan)
    return limits


def ask(server: Server, request: Request) -> Any:
    """Send one request and return the parsed answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    try:
        connection.request("POST", request.path, request.body, {"Content-Type": request.media_type})
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise SystemExit(f"{server.contestant.name} answered {response.status}: {body[:500]!r}")
    return json.loads(body)


def check(server: Server, setting: Setting, requests: list[Request]) -> None:
    """Refuse a contestant that does not give the answers of the reference: it would not do the same work."""
    answers = [read_answer(setting.task, ask(server, request)) for request in requests]
    if setting.task == "images":
        agreeing = sum(a[0] == b[0] for a, b in zip(answers, setting.reference, strict=True))
        is_right = len(answers[0]) == 5 and agreeing >= 0.9 * len(answers)
    else:
        agreeing = sum(
            max(abs(x - y) for x, y in zip(a, b, strict=True)) < 1e-6
            for a, b in zip(answers, setting.reference, strict=True)
        )
        is_right = agreeing == len(answers)
    if not is_right:
        raise SystemExit(
            f"{server.contestant.name} agrees with the reference on {agreeing} of {len(answers)}"
        )


def measure(contestant: Contestant, setting: Setting, limit: float) -> dict[str, Any]:
    """Start a contestant, check its answers, put it under load, and end it."""
    python = python_of(contestant, setting.scratch)
    with serving(contestant, python, setting.model, setting.task) as server:
        requests = [contestant.request(setting.task, body) for body in setting.bodies]
        check(server, setting, requests)
        plan = {
            "port": server.port,
            "requests": _encoded([request.encoded(server.port) for request in requests]),
            "phases": [asdict(phase) for phase in phases(setting.task, limit, setting.seconds)],
        }
        outcomes = run_part("load", plan=plan)
        return {"memory_bytes": server.memory_bytes(), "phases": outcomes[1:]}


def run_round(contestants: list[Contestant], setting: Setting) -> dict[str, Any]:
    """Measure the limit and every contestant once, in the order given."""
    limits = measure_limits(setting)
    print(f"{setting.task}: limit {limits['limit']:.1f} a second", flush=True)
    servers = {}
    for contestant in contestants:
        servers[contestant.name] = measured = measure(contestant, setting, limits["limit"])
        saturated = next(each for each in measured["phases"] if each["name"] == "saturation")
        throughput = len(saturated["latencies"]) / saturated["elapsed"]
        print(f"  {contestant.name:10} {throughput:9.1f} a second at saturation", flush=True)
    return {"limits": limits, "servers": servers}
