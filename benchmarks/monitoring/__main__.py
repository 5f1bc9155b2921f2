"""False alarms and delays of the monitor on streams drawn from real answers.

    python -m benchmarks.monitoring DATA [--part null delays] [--sets NAME ...]

DATA is a folder with a folder per data set, `NAME/val.npz` and `NAME/test.npz`. The active calibrator is
`ts`, fitted to `val.npz`; rows are drawn from the test split and labels from the law that the stream has: the
calibrator's own probabilities where calibration is intact. A run that was interrupted continues: each stream
is written to `--work` when it is done. `pip install river` adds the detectors of river. The tables of
docs/monitoring.md are printed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import command_line
from benchmarks.monitoring.detection import CHANGES, Record, delay_summary, delays, null, null_summary
from benchmarks.monitoring.streams import Answers

TEN, HUNDRED, THOUSAND = (
    "cifar10_densenet40",
    "cifar100_densenetbc100",
    "tinyimagenet_mobilenet_v2_k1000",
)
DETECTORS = ("ADWIN on error", "ADWIN on NLL", "Page-Hinkley on error", "Page-Hinkley on NLL")
Summaries = Mapping[str, dict[str, Any]]
"""What a part found, by data set."""


@dataclass(frozen=True)
class Part:
    """A part of the benchmark: one stream, what is reported of many, the table, and streams by data set."""

    one: Callable[[Answers, int], Record]
    summary: Callable[[list[Record]], dict[str, Any]]
    table: Callable[[Summaries], list[list[str]]]
    streams: dict[str, int]


def run(part: Part, name: str, answers: Answers, work: Path, most: int | None = None) -> dict[str, Any]:
    """Run the streams of a part that are not yet in the folder, and summarise all."""
    path = work / f"{name}-{answers.name}.jsonl"
    count = min(part.streams[answers.name], most or part.streams[answers.name])
    path.touch()
    records = [json.loads(line) for line in path.read_text().splitlines()][:count]
    with path.open("a") as file:
        while len(records) < count:
            records.append(part.one(answers, len(records)))
            file.write(json.dumps(records[-1]) + "\n")
            file.flush()
    return {"streams": count, **part.summary(records)}


def alarms(found: Summaries) -> list[list[str]]:
    """List the shares of streams without a change that raise an alarm."""
    tests = {
        "this test": ("this test 0.05", "this test 0.01"),
        "z-test every 100 labels": ("z-test 0.05", "z-test 0.01"),
        **{name: (name,) for name in DETECTORS},
    }
    columns = [(name, inputs) for name in found for inputs in ("calm", "harder")]
    rows = [["", *(f"{name}, {inputs}" for name, inputs in columns)]]
    for title, keys in tests.items():
        cells = [
            " / ".join(_share(found[name].get(f"{inputs}, {key}")) for key in keys)
            for name, inputs in columns
        ]
        rows.append([title, *cells])
    return rows


def medians(found: Summaries) -> list[list[str]]:
    lines = {
        "this test": "this test",
        "this test, 9 unlabelled rows a label": "this test, unlabelled",
        "this test, after 10,000 calm labels": "this test, after calm",
        "plain product of bettors, after 10,000": "product, after calm",
        "z-test every 100 labels": "z-test",
        **{f"{one}, after 10,000": f"{one}, after calm" for one in DETECTORS},
    }
    rows = [["", "", *CHANGES]]
    for name, values in found.items():
        for title, key in lines.items():
            rows.append([name, title, *(_delay(values, f"{change}, {key}") for change in CHANGES)])
    return rows


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _delay(found: Mapping[str, Any], key: str) -> str:
    """Write a median; a detector that raised an alarm before the change in most streams detects nothing."""
    early = found.get(f"{key}: alarm before the change", 0.0)
    if early > 0.5:
        return f"false alarm before in {early:.0%}"
    value = found.get(key)
    if value is None:
        return ""
    return f"{value:,.0f}" if math.isfinite(value) else "never"


PARTS = {
    "null": Part(null, null_summary, alarms, {TEN: 1000, HUNDRED: 1000, THOUSAND: 200}),
    "delays": Part(delays, delay_summary, medians, {TEN: 100, HUNDRED: 30}),
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sets", nargs="+", help="default: all that the part uses")
    parser.add_argument("--streams", type=int, help="at most so many")
    parser.add_argument("--work", type=Path, default=Path("/tmp/boxcal-monitoring"))  # noqa: S108 - resumable
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    for name in options.part:
        part = PARTS[name]
        chosen = [one for one in part.streams if not options.sets or one in options.sets]
        found = {
            one: run(part, name, Answers.of(options.data / one), options.work, options.streams)
            for one in chosen
        }
        for row in part.table(found):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
