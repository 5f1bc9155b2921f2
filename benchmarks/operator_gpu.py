"""Compares the operator on a GPU with `torch.softmax`, and its bandwidth with that of a device copy.

`python -m benchmarks.operator_gpu` on a machine with a CUDA device prints a table and writes
benchmarks/results/operator_gpu.json. Measurements alternate; the results are medians of CUDA event timings.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.operator import in_turns, paper_problem
from boxcal.calibrators.operator import box_constrained_softmax

RESULTS = Path(__file__).parent / "results" / "operator_gpu.json"
SIZES = ((4096, 1000), (256, 128_000), (64, 262_144))
CALLS, ROUNDS = 20, 15


def seconds(call: Callable[[], Any]) -> float:
    """Return the time of one call on the device, as the mean of a short run."""
    began, ended = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(CALLS):
        call()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000 / CALLS


def measure(rows: int, classes: int) -> dict[str, Any]:
    """Measure one size with uniform and vector bounds, softmax and a copy of as many bytes."""
    logits, lower, upper = (part.cuda() for part in paper_problem(rows, classes, seed=0))
    half = float(logits.softmax(-1).amax(-1).median())
    target = torch.empty_like(logits)
    sides: dict[str, Callable[[], Tensor]] = {
        "copy": lambda: target.copy_(logits),
        "softmax": lambda: torch.softmax(logits, -1),
        "uniform": lambda: box_constrained_softmax(logits, 0.0, half),
        "vector": lambda: box_constrained_softmax(logits, lower, upper),
    }
    for call in sides.values():
        seconds(call)
    timings = in_turns(sides, ROUNDS, lambda name: seconds(sides[name]))
    medians = {name: statistics.median(values) for name, values in timings.items()}
    copied = 2 * logits.nbytes / medians["copy"]
    moved = (4 * logits.nbytes + logits.numel()) / medians["vector"]
    return {
        "rows": rows,
        "classes": classes,
        "seconds": medians,
        "uniform_over_softmax": medians["uniform"] / medians["softmax"],
        "vector_share_of_copy_bandwidth": moved / copied,
    }


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this benchmark requires a CUDA device")
    results = []
    for rows, classes in SIZES:
        entry = measure(rows, classes)
        results.append(entry)
        print(
            f"{rows:5d} x {classes:6d}  uniform / softmax {entry['uniform_over_softmax']:.2f}"
            f"  vector bandwidth / copy {entry['vector_share_of_copy_bandwidth']:.0%}"
        )
    machine = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
