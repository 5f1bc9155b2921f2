"""`python -m benchmarks.serving`: measures, then prints the tables and draws the plot."""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

from benchmarks.serving import report
from benchmarks.serving.checking import check, reference
from benchmarks.serving.contestants import CONTESTANTS, TASKS, Contestant, Model, Task
from benchmarks.serving.environments import python_of
from benchmarks.serving.payloads import random_logits, read_images
from benchmarks.serving.running import Server, run_part, serving

IDLE_SECONDS = 3.0
RESULTS, PLOT = Path("benchmarks/results"), Path("docs/images/serving-latency.svg")
SCRATCH = Path("build/serving").absolute()
"""Environments of the other servers."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    names = [contestant.name for contestant in CONTESTANTS]
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="number of rounds; 0 only reports existing results"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="duration of each constant rate")
    parser.add_argument("--no-rates", action="store_true", help="skip constant rates, for slow models")
    for name, what in (
        ("model", "ONNX classifier"),
        ("labels", "its labels"),
        ("images", "folder of JPEG files"),
    ):
        variable = f"BENCH_SERVING_{name.upper()}"
        parser.add_argument(
            f"--{name}", type=Path, default=os.environ.get(variable), help=f"{what}; default ${variable}"
        )
    options = parser.parse_args()
    missing = [name for name in ("model", "labels", "images") if getattr(options, name) is None]
    if options.rounds and missing:
        parser.error(" ".join(f"--{name} or $BENCH_SERVING_{name.upper()} is required;" for name in missing))
    return options


def machine() -> dict[str, Any]:
    cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    return {"processor": cpu, "cores": os.cpu_count(), "python": platform.python_version()}


def measure(task: Task, chosen: list[Contestant], options: argparse.Namespace) -> dict[str, Any]:
    """Start all servers, check their responses, and run the measuring process."""
    model = Model(options.model.absolute(), options.labels.absolute())
    os.environ["BENCH_MODEL"] = str(model.path)
    bodies = read_images(options.images) if task == "images" else random_logits(64)
    expected = reference(task, bodies)
    with contextlib.ExitStack() as stack:
        servers: list[Server] = []
        plans = []
        for contestant in chosen:
            python = python_of(contestant, SCRATCH)
            server = stack.enter_context(serving(contestant, python, model, task))
            requests = [contestant.request(task, body) for body in bodies]
            check(server, task, requests, expected)
            encoded = [base64.b64encode(request.encoded(server.port)).decode() for request in requests]
            plans.append({"name": contestant.name, "port": server.port, "requests": encoded})
            servers.append(server)
            print(f"{contestant.name} is ready", flush=True)
        before, start = sum(server.processor_seconds() for server in servers), time.monotonic()
        time.sleep(IDLE_SECONDS)
        idle = (sum(server.processor_seconds() for server in servers) - before) / (time.monotonic() - start)
        plan = {
            "task": task,
            "model": str(model.path),
            "bodies": [base64.b64encode(body).decode() for body in bodies],
            "seconds": options.seconds,
            "rounds": options.rounds,
            "constant_rates": not options.no_rates,
            "servers": plans,
        }
        rounds = run_part("rounds", plan=plan)
        memory = {server.contestant.name: server.memory_bytes() for server in servers}
    return {
        "machine": machine(),
        "seconds": options.seconds,
        "cores_used_by_idle_servers": round(idle, 3),
        "memory_bytes": memory,
        "rounds": [report.condense(each) for each in rounds],
    }


def main() -> None:
    options = arguments()
    chosen = [contestant for contestant in CONTESTANTS if contestant.name in options.only]
    RESULTS.mkdir(parents=True, exist_ok=True)
    for contestant in chosen if options.rounds else []:
        python_of(contestant, SCRATCH)
    for task in options.tasks:
        file = RESULTS / f"serving-{task}.json"
        if options.rounds:
            file.write_text(json.dumps(measure(task, chosen, options), indent=1) + "\n")
        if file.exists():
            print(report.table(task, json.loads(file.read_text())), end="\n\n", flush=True)
    report.plot(RESULTS, PLOT)


if __name__ == "__main__":
    main()
