"""Methods that read features or inputs beside those that read logits, on real networks.

    python -m benchmarks.real_networks IMAGES MODEL.onnx [--only NAME...] [--store FOLDER]

IMAGES has the folders `train` and `test`, each with a folder per class of 32 x 32 images; MODEL.onnx is a
residual network for them. A second network is trained on the first images of `train` within minutes, without
augmentation; the third is `digits`. Half of `test` is for validation. `nc` runs the network hundreds of
times, so it is fitted to fewer rows, and `ts` beside it to the same. All results are stored, and a run does
only what is not; the table is printed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.real_networks.networks import Network, digits, residual, small
from boxcal.calibrators import fit
from boxcal.calibrators.evaluation.bootstrap import (
    Estimate,
    Resamples,
    deviations_of,
    mean_estimates,
    proportion_difference,
)
from boxcal.calibrators.evaluation.outcomes import Outcomes, outcomes
from boxcal.calibrators.evaluation.rows import HeldRows
from boxcal.calibrators.evaluation.toplabel import SmoothError

STORE = Path(__file__).parents[1] / "results" / "real_networks.tmp"
LOGITS = ("uncalibrated", "ts", "pb", "dpb", "ts+pb", "pb-mlp", "ets+pb")
FEATURES = ("fc", "fc+pb", "ta", "ta+pb")
FEW = ("ts few", "nc few")
"""Fitted to the rows that `nc` is fitted to."""
DECIMALS = (2, 4, 4, 2)
"""Of the error rate and the smooth ECE, which are percentages, and of NLL and Brier score between them."""
DRAWS = 400


def run(network: Network, name: str) -> dict[str, Any]:
    """Fit a method and give its outcomes on the test set."""
    method, _, few = name.partition(" ")
    rows = slice(network.shifted if few else None)
    inputs, labels = (part[rows] for part in network.validation)
    reads = "features" if name in FEATURES else "logits"
    given: dict[str, Any] = {}
    if name in FEATURES:
        given = {"features": network.read["features"][0][rows], "head": network.head}
    if method == "nc":
        given = {"inputs": inputs, "backbone": network.logits}
    logits = network.read["logits"][0][rows]
    began = time.process_time()
    result = fit(method, logits, labels, **given)
    seconds = time.process_time() - began
    calibrator, source = result.calibrator, network.read[reads][1]
    truth, shift = network.test[1], calibrator.input_shift
    if shift is not None:
        source = network.run(network.logits, network.test[0] + shift.float())
    scored = outcomes(calibrator(source), truth, calibrator.calibrate(source).logits.argmax(dim=1))
    values = {one.name: getattr(scored, one.name) for one in fields(scored)}
    kept = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
    kept["probabilities"] = scored.probabilities.at(slice(None))
    own = {f"parameter {key}": np.array(value) for key, value in _numbers(calibrator).items()}
    return {**kept, **own, "seconds": seconds, "evaluations": result.certificate.evaluations}


def _numbers(calibrator: Any) -> dict[str, float]:
    described = {**calibrator.logit_map.describe(), **calibrator.bound_map.describe()}
    return {key: value for key, value in described.items() if isinstance(value, float)}


class Judged:
    """Stored outcomes of a method, and the noise of their smooth ECE."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as arrays:
            values = {one.name: arrays[one.name] for one in fields(Outcomes) if one.name in arrays}
            values["probabilities"] = HeldRows(values["probabilities"])
            self.seconds = float(arrays["seconds"])
        self.scored = Outcomes(**values)
        smooth = SmoothError(self.scored)
        self.smooth = deviations_of([smooth], Resamples(len(self.scored), draws=DRAWS))[smooth.name]
        self.wrong = 1.0 - self.scored.correct
        self.values = [
            100.0 * float(self.wrong.mean()),
            float(self.scored.nll.mean()),
            float(self.scored.brier.mean()),
            100.0 * smooth.value,
        ]

    def minus(self, other: Judged) -> list[Estimate]:
        """Give the differences, paired by sample, with 95 % intervals."""
        mine, theirs = self.scored, other.scored
        columns = np.column_stack([mine.nll - theirs.nll, mine.brier - theirs.brier])
        shares = proportion_difference(self.wrong, other.wrong), self.smooth.minus(other.smooth)
        error, smooth = (Estimate(100 * one.value, 100 * one.low, 100 * one.high) for one in shares)
        return [error, *mean_estimates(columns, Resamples(len(columns), draws=DRAWS)), smooth]


def table(key: str, network: Network, store: Path) -> str:
    """Write the table of a network: each metric, and its difference to `ts` with a 95 % interval."""
    paths = {name: store / f"{key}-{name}.npz" for name in (*LOGITS, *FEATURES, *FEW)}
    found = {name: Judged(path) for name, path in paths.items() if path.exists()}
    lines = [
        "| method | rows | error % | NLL | Brier | smECE % | fit, s |",
        "|---|---:|---|---|---|---|---:|",
    ]
    for name, one in found.items():
        method, _, few = name.partition(" ")
        base = f"ts {few}".rstrip()
        cells = [f"{value:.{decimals}f}" for value, decimals in zip(one.values, DECIMALS, strict=True)]
        if base in found and base != name:
            changes = zip(one.minus(found[base]), DECIMALS, strict=True)
            ends = [f" ({end.low:+.{decimals}f} to {end.high:+.{decimals}f})" for end, decimals in changes]
            cells = [cell + end for cell, end in zip(cells, ends, strict=True)]
        rows = network.shifted if few else len(network.validation[1])
        lines.append(f"| `{method}` | {rows:,} | " + " | ".join(cells) + f" | {one.seconds:.1f} |")
    return f"### {network.title}\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Run what is not stored, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", type=Path)
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", nargs="*", help="names of networks (default: all)")
    parser.add_argument("--without", nargs="*", default=[], help="methods that are not run")
    parser.add_argument("--store", type=Path, default=STORE)
    options = parser.parse_args()
    options.store.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    openers: dict[str, Callable[[], Network]] = {
        "digits": digits,
        "small": partial(small, options.images, options.store / "small-weights.npz"),
        "resnet20": partial(residual, options.images, options.model),
    }
    for key, opener in openers.items():
        if options.only and key not in options.only:
            continue
        network = opener()
        for name in (*LOGITS, *FEATURES, *FEW):
            path = options.store / f"{key}-{name}.npz"
            if not path.exists() and name.partition(" ")[0] not in options.without:
                np.savez(path, **run(network, name))
        print(table(key, network, options.store), flush=True)


if __name__ == "__main__":
    main()
