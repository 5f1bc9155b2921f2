"""`python -m benchmarks.serving`: adds rounds to a results file, then prints the table and draws the plot."""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.serving import report
from benchmarks.serving.contestants import CONTESTANTS, TASKS, Model, Task
from benchmarks.serving.environments import python_of
from benchmarks.serving.payloads import random_logits, read_answer, read_images
from benchmarks.serving.peers.work import Classifier, prepare, softmax_json, top_five
from benchmarks.serving.rounds import Setting, run_round


def arguments() -> argparse.Namespace:
    """Read the command line; paths default to the environment."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    names = [contestant.name for contestant in CONTESTANTS]
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names)
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds to add; 0 only reports")
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each constant rate")
    for name, what in (
        ("model", "ONNX classifier"),
        ("labels", "its labels"),
        ("images", "folder of JPEG files"),
    ):
        variable = f"BENCH_SERVING_{name.upper()}"
        parser.add_argument(
            f"--{name}", type=Path, default=os.environ.get(variable), help=f"{what}; default ${variable}"
        )
    parser.add_argument("--scratch", type=Path, default=Path("build/serving"), help="the peers' environments")
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results"), help="folder of the results"
    )
    parser.add_argument("--plot", type=Path, default=Path("docs/images/serving-latency.svg"))
    options = parser.parse_args()
    missing = [name for name in ("model", "labels", "images") if getattr(options, name) is None]
    if options.rounds and missing:
        parser.error(" ".join(f"--{name} or $BENCH_SERVING_{name.upper()} is needed;" for name in missing))
    return options


def reference(task: Task, bodies: list[bytes]) -> list[list[float]]:
    """Return the answers that every contestant has to give."""
    if task == "logits":
        return [read_answer(task, json.loads(softmax_json(body))) for body in bodies]
    classifier = Classifier(threads=1)
    tensors = [prepare(Image.open(io.BytesIO(body))) for body in bodies]
    return [read_answer(task, top_five(classifier.logits(tensor[None])[0])) for tensor in tensors]


def machine() -> dict[str, Any]:
    """Describe where it ran."""
    cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    return {"processor": cpu, "cores": os.cpu_count(), "python": platform.python_version()}


def main() -> None:
    """Run what the command line asks for."""
    options = arguments()
    chosen = [contestant for contestant in CONTESTANTS if contestant.name in options.only]
    options.results.mkdir(parents=True, exist_ok=True)
    if options.rounds:
        for contestant in chosen:
            python_of(contestant, options.scratch.absolute())
    for task in options.tasks:
        file = options.results / f"serving-{task}.json"
        results: dict[str, Any] = {"machine": machine(), "rounds": []}
        if file.exists():
            results = json.loads(file.read_text())
        if options.rounds:
            os.environ["BENCH_MODEL"] = str(options.model.absolute())
            bodies = read_images(options.images) if task == "images" else random_logits(64)
            model = Model(options.model.absolute(), options.labels.absolute())
            scratch = options.scratch.absolute()
            setting = Setting(task, model, bodies, reference(task, bodies), options.seconds, scratch)
        for _ in range(options.rounds):
            # Another one begins each time, so that no one always meets the machine in the same state.
            shift = len(results["rounds"]) % len(chosen)
            round_ = run_round(chosen[shift:] + chosen[:shift], setting)
            results["rounds"].append({"command": sys.argv[1:], **report.condense(round_)})
            file.write_text(json.dumps(results, indent=1) + "\n")
        if results["rounds"]:
            print(report.table(task, results), flush=True)
    report.plot(options.results, options.plot)


if __name__ == "__main__":
    main()
