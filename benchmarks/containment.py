"""Check that no fit ends above the fit of a method that it contains, on validation sets from `.npz` files.

    python -m benchmarks.containment FILE... [--seeds 5] [--rows 300] [--methods ts,pts] [--factors 1,1e-6]

A file holds `logits` (N, K) or `probabilities`, and `labels`. Each seed draws its own rows from the file and
also seeds the fits. All logits are multiplied by each factor. Each method is fitted on its own, and its
objective (validation NLL plus penalty) is compared with those of independent fits of the contained methods.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.optima import read
from boxcal.calibrators import fit
from boxcal.calibrators.fitting.result import Certificate

METHODS = "ts,ets,pts,vector,sms,lb,dpb,pb,pb-mlp,ts+pb,ts+lb,vector+pb,pts+pb,ts+pb-mlp,pts+pb-mlp"
TOLERANCE = 1e-6


def excesses(logits: Tensor, labels: Tensor, methods: Sequence[str], seed: int) -> dict[str, float]:
    """Give, for each method, how far it ends above the lowest of those it contains; below 0 it is lower."""
    known: dict[str, Certificate] = {}

    def certificate(name: str) -> Certificate:
        if name not in known:
            known[name] = fit(name, logits, labels, seed=seed).certificate
        return known[name]

    found = {}
    for name in methods:
        own = certificate(name)
        others = [own.uncalibrated_nll, *(certificate(one).objective for one in own.contains)]
        found[name] = own.objective - min(others)
    return found


def main() -> None:
    """Print one line per set and method: the largest excess over all seeds and factors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--factors", default="1")
    options = parser.parse_args()
    methods, factors = options.methods.split(","), [float(part) for part in options.factors.split(",")]
    print("| set | K | method | fits | largest excess, nats | within 1e-6 |")
    print("|---|---|---|---|---|---|")
    for path in options.files:
        logits, labels = read(path)
        worst = dict.fromkeys(methods, -math.inf)
        for seed in range(options.seeds):
            rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))[: options.rows]
            for factor in factors:
                for name, excess in excesses(logits[rows] * factor, labels[rows], methods, seed).items():
                    worst[name] = max(worst[name], excess)
        for name, excess in worst.items():
            verdict = "yes" if excess <= TOLERANCE else "no"
            cells = [path.parent.name, logits.shape[1], f"`{name}`", options.seeds * len(factors)]
            print(f"| {' | '.join(map(str, [*cells, f'{excess:+.1e}', verdict]))} |", flush=True)


if __name__ == "__main__":
    main()
