"""Processes on one port, measured by wrk: `python -m benchmarks.workers [--mosec PYTHON]`.

Every server gets the same bodies on the same connections, in turns; the medians over the rounds are printed,
after one that is not counted. `--mosec` names an interpreter that has mosec, numpy, onnxruntime, orjson and
pillow. Images are measured with `--model`, `--labels` and `--images`; the offline loop is the one of
`benchmarks.serving.limits` with sessions like those of the service, in a process per core.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.serving.contestants import CONTESTANTS, OURS, TASKS, Model, Task, declared
from benchmarks.serving.limits import images_as_served
from benchmarks.serving.payloads import Request, free_port, random_logits, read_images
from benchmarks.serving.running import service, started

SCRIPT = """
local bodies = {{}}
for number = 1, {count} do
  local file = io.open("{folder}/" .. number, "rb")
  bodies[number] = file:read("*a")
  file:close()
end
local number = 0
request = function()
  number = number % {count} + 1
  return wrk.format("POST", "{path}", {{["Content-Type"] = "{media_type}"}}, bodies[number])
end
"""


def require(condition: bool, found: object) -> None:
    """Stop the measurement if something did not do what it should."""
    if not condition:
        raise RuntimeError(f"unexpected: {found}")


def script(folder: Path, name: str, requests: Sequence[Request]) -> Path:
    """Write the bodies and a program for wrk that sends one after the other."""
    (bodies := folder / f"{name}-bodies").mkdir()
    for number, request in enumerate(requests, 1):
        (bodies / str(number)).write_bytes(request.body)
    (file := folder / f"{name}.lua").write_text(
        SCRIPT.format(
            count=len(requests), folder=bodies, path=requests[0].path, media_type=requests[0].media_type
        )
    )
    return file


def wrk(port: int, program: Path, seconds: float, connections: int) -> float:
    """Load a server; gives the rate of its answers, all of which must be good."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", "30s", "-s", str(program)]
    done = subprocess.run([*command, f"http://127.0.0.1:{port}"], check=True, capture_output=True, text=True)
    require("Non-2xx" not in done.stdout and "Socket errors" not in done.stdout, done.stdout)
    found = re.search(r"Requests/sec:\s+(\S+)", done.stdout)
    require(found is not None, done.stdout)
    return float(found[1]) if found else 0.0


def measure(task: Task, options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    is_logits = task == "logits"
    bodies = random_logits(64) if is_logits else read_images(options.images)
    os.environ["BENCH_TASK"] = task
    ours = next(one for one in CONTESTANTS if one.name == OURS)
    mosec = next(one for one in CONTESTANTS if one.name == "mosec")
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        settings: dict[str, object] = {"model": "logits:1000"}
        if not is_logits:
            settings = {"model": f"onnx:{declared(options.model, folder)}", "labels": options.labels}
        programs = {
            one.name: script(folder, f"{task}-{one.name}", [one.request(task, body) for body in bodies])
            for one in (ours, mosec)
        }
        targets = []
        for workers in (1, options.workers):
            port, _ = stack.enter_context(service(**settings, workers=workers, device="cpu"))
            time.sleep(6)  # the other processes
            targets.append((f"boxcal, {workers}", port, programs[ours.name]))
        if options.mosec:
            port = free_port()
            command = mosec.launch(Path(options.mosec), Model(Path(), Path()), port, folder).command
            stack.enter_context(started(command, f"http://127.0.0.1:{port}/", {"BENCH_TASK": task}))
            time.sleep(6)  # the other processes
            targets.append((f"mosec, {os.cpu_count()}", port, programs[mosec.name]))
        for number in range(options.rounds + 1):
            for name, port, program in targets:
                rate = wrk(port, program, options.seconds, options.connections)
                if number:
                    found.setdefault(name, []).append(rate)
            if number and not is_logits:
                found.setdefault("offline loop", []).append(images_as_served(bodies, options.seconds))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.workers", description=__doc__)
    parser.add_argument("--mosec", help="interpreter of an environment with mosec")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=5)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    for name in ("model", "labels", "images"):
        parser.add_argument(f"--{name}", type=Path)
    options = parser.parse_args()
    print("| task | server, processes | requests per second | of mosec | of the offline loop |")
    print("| --- | --- | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory(prefix="boxcal-workers-") as name:
        for task in reversed(options.tasks):
            if task == "images" and options.model is None:
                continue
            if task == "images":
                os.environ["BENCH_MODEL"] = str(options.model)
            rates = {
                name: statistics.median(rates) for name, rates in measure(task, options, Path(name)).items()
            }
            peer = next((rate for name, rate in rates.items() if name.startswith("mosec")), None)
            offline = rates.get("offline loop")
            for server, rate in rates.items():
                shares = ("-" if one is None else f"{rate / one:.2f}" for one in (peer, offline))
                print(f"| {task} | {server} | {rate:,.1f} | {' | '.join(shares)} |", flush=True)


if __name__ == "__main__":
    main()
