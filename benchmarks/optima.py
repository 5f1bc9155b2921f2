"""Compares fits with the best of many random starting points, on validation sets in `.npz` files.

    python -m benchmarks.optima FILE... [--starts 200] [--methods pb,ts+pb,dpb,ets,lb]

A file contains `logits` (N, K) or `probabilities`, and `labels`. Random starting points are uniform within
the limits of the search (in the lowest part of wide limits). Each is optimised until convergence with the
method of the fit.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from torch import Tensor

from boxcal.calibrators import fit
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.fitting.clip_limits import SortedLogits
from boxcal.calibrators.fitting.closed_form_gradients import objective_of
from boxcal.calibrators.fitting.constant_box import Plane
from boxcal.calibrators.fitting.descent import Objective, descend
from boxcal.calibrators.method import BOUND_MAPS, parse
from boxcal.calibrators.operator.uniform import SortedRows
from boxcal.calibrators.parametrised import Limits
from boxcal.calibrators.threads import one_library_thread

METHODS = "pb,ts+pb,dpb,ets,lb"
WIDE = 5.0


def read(path: Path) -> tuple[Tensor, Tensor]:
    """Read logits, or log probabilities, and labels."""
    with np.load(path) as arrays:
        if "logits" in arrays:
            logits = arrays["logits"].astype(np.float64)
        else:
            logits = np.log(np.maximum(arrays["probabilities"].astype(np.float64), 1e-300))
        data = check_validation_set(logits, arrays["labels"])
    return data.scores, data.labels


def objective_for(method: str, logits: Tensor, labels: Tensor) -> tuple[Objective, Limits]:
    """Return the objective of a fit of the method, and the limits of its coordinates."""
    parts = parse(method)
    num_classes = logits.shape[1]
    if method == "pb":
        plane = Plane(num_classes, "both")
        return plane.loss(SortedRows(logits, labels)), plane.limits
    if method == "lb":
        return SortedLogits(logits.numpy(), labels.numpy()), parts.logit_map(num_classes).limits()
    bound_map = BOUND_MAPS[parts.bounds](num_classes) if parts.bounds else None
    objective = objective_of(parts.logit_map(num_classes), bound_map, logits, labels)
    return objective, objective.limits


def best_random(method: str, logits: Tensor, labels: Tensor, starts: range) -> tuple[float, int]:
    """Return the lowest NLL from random starting points, and how many come within 1e-7 of it."""
    objective, limits = objective_for(method, logits, labels)
    ends = []
    for number in starts:
        rng = np.random.default_rng(number)
        start = np.array([_uniform(rng, low, high) for low, high in limits])
        ends.append(descend(objective, start, limits)[1])
    lowest = min(ends)
    return lowest, sum(end <= lowest + 1e-7 for end in ends)


def _uniform(rng: np.random.Generator, low: float | None, high: float | None) -> float:
    """Draw one coordinate: a weight from 0 to 1.5, a logarithm from a wide range."""
    if low == 0.0:
        return rng.uniform(0.0, min(high or 1.5, 1.5))
    return rng.uniform(max(low or -WIDE, -14.0), min(high or WIDE, WIDE))


def main() -> None:
    """Print one line per file and method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--methods", default=METHODS)
    options = parser.parse_args()
    print("| set | K | method | NLL of the fit | above the best start | starts as low | fit, s | starts, s |")
    print("|---|---|---|---|---|---|---|---|")
    for path in options.files:
        logits, labels = read(path)
        for method in options.methods.split(","):
            result = fit(method, logits, labels)
            begun = time.perf_counter()
            with one_library_thread():
                lowest, as_low = best_random(method, logits, labels, range(options.starts))
            print(
                f"| {path.parent.name} | {logits.shape[1]} | `{method}` | {result.nll:.7f} "
                f"| {result.nll - lowest:+.1e} | {as_low} of {options.starts} | {result.seconds:.1f} "
                f"| {time.perf_counter() - begun:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
