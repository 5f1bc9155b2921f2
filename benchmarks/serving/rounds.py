"""The measuring process: in every round the limit, then each server in turn, all of them started before.

    python -m benchmarks.serving.rounds PLAN.json RESULT.json

The servers run side by side for the whole measurement, each idle while another is under load, so that rounds
alternate quickly and whatever else the machine does meets all of them alike.
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
"""Of the limit: the constant rates. With logits the protocol costs more than the work: none comes near it."""
SATURATING = 16
"""Connections that are always busy at saturation."""
CONNECTIONS = 128
"""Connections for a constant rate; a request that finds none free waits, and its wait is counted."""


def phases(task: Task, limit: float, seconds: float, *, constant_rates: bool) -> list[Phase]:
    """Return the load that every contestant meets: warm-up, lone client, saturation, constant rates."""
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
    """Carry out a plan."""
    plan = json.loads(asked.read_text())
    # Another one begins each time, so that no one always meets the machine in the same state.
    rounds = [run_round(plan, number % len(plan["servers"])) for number in range(plan["rounds"])]
    answered.write_text(json.dumps(rounds))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
