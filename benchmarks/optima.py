"""How far every fit stays above the best of many random starts, on validation sets given as `.npz` files.

    python -m benchmarks.optima FILE... [--starts 200] [--methods pb,ts+pb,dpb,ets,lb]

A file holds `logits` (N, K) or `probabilities`, and `labels`. Random starts are uniform in the limits of the
search (in the lowest part of wide ones), and each is followed by the descent that a fit uses, to its end.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from calibrators import fit
from calibrators.data import check_validation_set
from calibrators.fitting.descent import descend
from calibrators.fitting.joint import JointObjective
from calibrators.method import BOUND_MAPS, parse

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


def best_random(method: str, logits: Tensor, labels: Tensor, starts: int) -> float:
    """Give the lowest NLL that descents from random starts reach."""
    parts = parse(method)
    num_classes = logits.shape[1]
    bound_map = BOUND_MAPS[parts.bounds](num_classes) if parts.bounds else None
    objective = JointObjective(parts.logit_map(num_classes), bound_map, logits, labels)
    rng = np.random.default_rng(1)
    lowest = np.inf
    for _ in range(starts):
        start = np.array([_uniform(rng, low, high) for low, high in objective.limits])
        lowest = min(lowest, descend(objective, start, objective.limits)[1])
    return lowest


def _uniform(rng: np.random.Generator, low: float | None, high: float | None) -> float:
    """Draw one coordinate: of a weight from 0 up to 1.5, of a logarithm from a wide range."""
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
    torch.set_num_threads(1)
    print("| set | method | NLL of the fit | best of random starts | fit above best | fit's seconds |")
    print("|---|---|---|---|---|---|")
    for path in options.files:
        logits, labels = read(path)
        for method in options.methods.split(","):
            result = fit(method, logits, labels)
            lowest = best_random(method, logits, labels, options.starts)
            print(
                f"| {path.parent.name} | {method} | {result.nll:.9f} | {lowest:.9f} "
                f"| {result.nll - lowest:+.1e} | {result.seconds:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
