"""The measuring process: each round measures the limit, then each server in turn; all are running.

    python -m benchmarks.serving.rounds PLAN.json RESULT.json

All servers run during the whole measurement, idle while another one is measured, so rounds alternate quickly
and other load on the machine affects all servers alike.
"""

from __future__ import annotations

import base64
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.serving.contestants import Task
from benchmarks.serving.load import Generator, Phase
from benchmarks.serving.running import run_part

FRACTIONS: dict[Task, tuple[float, ...]] = {"images": (0.5, 0.75, 0.9), "logits": (0.05, 0.15, 0.3)}
"""Constant rates as shares of the limit. None for logits: no server comes near the limit."""
SATURATING = 16
"""Connections that are always busy at saturation."""
CONNECTIONS = 128
"""Connections for a constant rate; if none is free, the waiting time is part of the latency."""


def phases(task: Task, limit: float, seconds: float, *, constant_rates: bool) -> list[Phase]:
    """Return the phases: warm-up, single client, saturation, constant rates."""
    fractions = FRACTIONS[task] if constant_rates else ()
    return [
        Phase("warm-up", 0.5, SATURATING),
        Phase("lone", 0.7 * seconds, 1),
        Phase("saturation", 1.6 * seconds, SATURATING),
        *(
            Phase(f"{fraction:.0%} of the limit", seconds, CONNECTIONS, fraction * limit)
            for fraction in fractions
        ),
    ]


def run_round(plan: dict[str, Any], first: int) -> dict[str, Any]:
    """Measure the limit and every server once, beginning with the one at position `first`."""
    task, seconds = plan["task"], plan["seconds"]
    limits = run_part("limits", task, str(seconds), plan={"model": plan["model"], "bodies": plan["bodies"]})
    print(f"{task}: limit {limits['limit']:.1f} a second", flush=True)
    servers = plan["servers"]
    load = phases(task, limits["limit"], seconds, constant_rates=plan["constant_rates"])
    measured = {}
    for server in servers[first:] + servers[:first]:
        generator = Generator(server["port"], [base64.b64decode(request) for request in server["requests"]])
        outcomes = [generator.run(phase) for phase in load]
        measured[server["name"]] = {"phases": [asdict(outcome) for outcome in outcomes[1:]]}
        print(f"  {server['name']:10} {outcomes[2].throughput:9.1f} a second at saturation", flush=True)
    return {"limits": limits, "servers": measured}


def main(asked: Path, answered: Path) -> None:
    plan = json.loads(asked.read_text())
    # The order changes, so that no server is always measured in the same state of the machine.
    rounds = [run_round(plan, number % len(plan["servers"])) for number in range(plan["rounds"])]
    answered.write_text(json.dumps(rounds))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
