"""False alarms, delays, duels, loops and intervals of the monitor on streams drawn from real answers.

    python -m benchmarks.monitoring DATA [--part null ...] [--sets NAME ...]
    python -m benchmarks.monitoring        # tables and images of the documents from recorded results

DATA is a folder with a folder per data set, `NAME/val.npz` and `NAME/test.npz`. The active calibrator is
`ts`, fitted to `val.npz`; rows are drawn from the test split and labels from the law that the stream has: the
calibrator's own probabilities where calibration is intact. A run that was interrupted continues: each stream
is written to `--work` when it is done. `pip install river` adds the detectors of river.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.monitoring import page
from benchmarks.monitoring.decisions import duel_summary, duels, loop, loop_summary
from benchmarks.monitoring.detection import Record, delay_summary, delays, null, null_summary
from benchmarks.monitoring.estimates import intervals, material, means, prior, speed
from benchmarks.monitoring.feedback import feedback, feedback_summary
from benchmarks.monitoring.streams import Answers

TEN, HUNDRED, EUROSAT, TINY, THOUSAND = (
    "cifar10_densenet40",
    "cifar100_densenetbc100",
    "eurosat_rgb",
    "tinyimagenet_mobilenet_v2",
    "tinyimagenet_mobilenet_v2_k1000",
)


@dataclass(frozen=True)
class Part:
    """A part of the benchmark: one stream, what is reported of many, and how many on which sets."""

    one: Callable[[Answers, int], Record]
    summary: Callable[[list[Record]], dict[str, Any]]
    streams: dict[str, int]


PARTS = {
    "null": Part(null, null_summary, {TEN: 1000, HUNDRED: 1000, THOUSAND: 200}),
    "delays": Part(delays, delay_summary, {TEN: 100, HUNDRED: 30}),
    "material": Part(material, means, {TEN: 1, HUNDRED: 1, EUROSAT: 1, TINY: 1}),
    "duels": Part(duels, duel_summary, {TEN: 500, HUNDRED: 500}),
    "loop": Part(loop, loop_summary, {TEN: 100, HUNDRED: 100}),
    "intervals": Part(intervals, means, {TEN: 400, HUNDRED: 400}),
    "prior": Part(prior, means, {TEN: 200, HUNDRED: 200}),
    "speed": Part(speed, means, {TEN: 1, HUNDRED: 1, THOUSAND: 1}),
    "feedback": Part(feedback, feedback_summary, {TEN: 100}),
}


def run(part: str, answers: Answers, work: Path, most: int | None) -> dict[str, Any]:
    """Run the streams of a part that are not yet in the folder, and summarise all."""
    spec, path = PARTS[part], work / f"{part}-{answers.name}.jsonl"
    count = min(spec.streams[answers.name], most or spec.streams[answers.name])
    path.touch()
    records = [json.loads(line) for line in path.read_text().splitlines()][:count]
    with path.open("a") as file:
        while len(records) < count:
            records.append(spec.one(answers, len(records)))
            file.write(json.dumps(records[-1]) + "\n")
            file.flush()
    return {"streams": count, **spec.summary(records)}


def main() -> None:
    """Run what was asked for on each data set, record it, and write the documents' tables and images."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.monitoring",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("data", type=Path, nargs="?")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sets", nargs="+", help="default: all that the part uses")
    parser.add_argument("--streams", type=int, help="at most so many, without recording the results")
    parser.add_argument("--work", type=Path, default=Path("/tmp/boxcal-monitoring"))  # noqa: S108 - resumable
    options = parser.parse_args()
    if options.data is None:
        page.write()
        return
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    for part in options.part:
        for name in PARTS[part].streams:
            if options.sets and name not in options.sets:
                continue
            found = run(part, Answers.of(options.data / name), options.work, options.streams)
            print(part, name, json.dumps(found, indent=1), flush=True)
            if not options.streams:
                page.record(part, name, found)


if __name__ == "__main__":
    main()
