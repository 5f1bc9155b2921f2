"""What `auto` chooses on data whose truth is known, beside the best method in hindsight.

`python -m benchmarks.auto [--truths 100] [--samples 1000] [--classes 4] [--budget 60] [--file FILE]`

A truth is a distortion of calibrated logits: a temperature, a factor and an offset for each class, an affine
map, a box, or none. The oracle is the method with the lowest NLL on 20,000 new samples, of all candidates
but networks, and of the networks and combinations that `auto` compared. Each truth is a line of FILE, and a
later run continues there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from boxcal.calibrators import Calibrator, fit
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.fitting.candidates import candidates
from boxcal.calibrators.fitting.fitted import Fitted
from boxcal.calibrators.fitting.fitter import fit_checked
from boxcal.calibrators.method import parse
from boxcal.calibrators.threads import one_library_thread

Floats = NDArray[np.float64]
TEST_SAMPLES = 20_000
TOLERANCE = 1e-5
REAL = 1e-3
"""Nats that the oracle must gain over the unchanged logits, for `auto` to miss something by keeping them."""


def temperature(logits: Floats, rng: np.random.Generator) -> Floats:
    """Make the logits 0.6 to 2.5 times as large."""
    return logits * float(np.exp(rng.uniform(np.log(0.6), np.log(2.5))))


def vector(logits: Floats, rng: np.random.Generator) -> Floats:
    """Give every class a factor and an offset."""
    classes = logits.shape[1]
    result: Floats = logits * np.exp(0.3 * rng.normal(size=classes)) + 0.7 * rng.normal(size=classes)
    return result


def dirichlet(logits: Floats, rng: np.random.Generator) -> Floats:
    """Mix the classes."""
    classes = logits.shape[1]
    mixing = np.eye(classes) + 0.3 * rng.normal(size=(classes, classes)) / np.sqrt(classes)
    result: Floats = logits @ mixing.T + 0.3 * rng.normal(size=classes)
    return result


def calibrated(logits: Floats, rng: np.random.Generator) -> Floats:
    """Leave them."""
    del rng
    return logits


TRUTHS: dict[str, Callable[[Floats, np.random.Generator], Floats]] = {
    "temperature": temperature,
    "vector": vector,
    "dirichlet": dirichlet,
    "box": calibrated,
    "calibrated": calibrated,
}


class World:
    """A truth: draws logits of a model, and labels."""

    def __init__(self, kind: str, classes: int, seed: int) -> None:
        self.kind, self.classes = kind, classes
        self._shape = np.random.SeedSequence([seed, 1])
        self._rng = np.random.default_rng([seed, 2])
        self.noise = np.random.default_rng([seed, 3]).uniform(0.03, 0.15) if kind == "box" else 0.0

    def draw(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (count, K) and labels (count,)."""
        honest = 2.5 * self._rng.normal(size=(count, self.classes))
        labels = (honest + self._rng.gumbel(size=honest.shape)).argmax(axis=1)
        random = self._rng.random(count) < self.noise
        labels[random] = self._rng.integers(0, self.classes, random.sum())
        logits = TRUTHS[self.kind](honest, np.random.default_rng(self._shape))
        return torch.from_numpy(logits), torch.from_numpy(labels)


def nll(calibrator: Calibrator, logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean loss on new samples."""
    own = calibrator(logits).gather(1, labels[:, None])
    return -own.clamp_min(1e-300).log().mean().item()


def run(kind: str, seed: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Fit `auto` and each of its candidates to one truth."""
    world = World(kind, arguments.classes, seed)
    logits, labels = world.draw(arguments.samples)
    unseen = world.draw(TEST_SAMPLES)
    started = time.perf_counter()
    result = fit("auto", logits, labels, budget_seconds=arguments.budget)
    seconds = time.perf_counter() - started
    chosen = nll(result.calibrator, *unseen)
    means = result.choice["cross_validated_nll"]
    data, known = check_validation_set(logits, labels), dict[str, Fitted]()
    plain = [name for name in candidates(data) if name not in means and not parse(name).is_network]
    with one_library_thread():
        others = {
            name: nll(fit_checked(name, data, thorough=False, known=known).calibrator, *unseen)
            for name in [*means, *plain]
        }
    size = {name: parse(name).num_parameters(arguments.classes) for name in means}
    own = result.method
    return {
        "kind": kind,
        "method": own,
        "oracle": min(others, key=others.__getitem__),
        "regret": chosen - min(others.values()),
        "gain": chosen - others["uncalibrated"],
        "dominated": [
            name
            for name in means
            if means[name] < means[own] - TOLERANCE and size[name] < size[own] and not parse(name).is_network
        ],
        "compared": len(means),
        "seconds": seconds,
    }


def main() -> None:
    """Run all truths and print one row for each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--truths", type=int, default=100)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--classes", type=int, default=4)
    parser.add_argument("--budget", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file", type=Path, default=Path("benchmarks/results/auto.tmp"))
    arguments = parser.parse_args()
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    arguments.file.touch()
    rows: list[dict[str, Any]] = [json.loads(line) for line in arguments.file.read_text().splitlines()]
    for number in range(len(rows), arguments.truths):
        rows.append(run(list(TRUTHS)[number % len(TRUTHS)], arguments.seed + number, arguments))
        with arguments.file.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        print(rows[-1], flush=True)
    print("| truth | sets | selected | mean regret | mean gain over raw | dominated | could gain | missed |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in [*TRUTHS, "all"]:
        some = [row for row in rows if kind in (row["kind"], "all")]
        if not some:
            continue
        chosen = ", ".join(sorted({row["method"] for row in some}))
        regret, gain = (np.mean([row[key] for row in some]) for key in ("regret", "gain"))
        dominated = sum(bool(row["dominated"]) for row in some)
        gains = [row for row in some if row["gain"] - row["regret"] < -REAL]
        missed = sum(row["method"] == "uncalibrated" for row in gains)
        numbers = [f"{regret:.5f}", f"{gain:+.5f}", dominated, len(gains), missed]
        print(*["", kind, len(some), chosen, *numbers, ""], sep=" | ")


if __name__ == "__main__":
    main()
