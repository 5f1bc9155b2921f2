"""How often the gate activates a calibrator by simulation, beside the earlier gate.

`python -m benchmarks.gate [--simulations 500] [--others 100] [--samples 300 1000 5000] [--classes 10 100]`

Every simulation cross-fits a method and asks two gates: this one (NLL significantly lower, neither Brier
score nor smooth ECE significantly higher, in intervals that hold together), and the earlier one (the 95 %
interval of the NLL difference below 0). On calibrated logits every fit is truly worse than none.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from numpy.typing import NDArray

from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.evaluation.bootstrap import DRAWS, Deviations, deviations_of, mean_estimates
from boxcal.calibrators.evaluation.crossfit import cross_fit
from boxcal.calibrators.evaluation.outcomes import Outcomes, outcomes
from boxcal.calibrators.evaluation.toplabel import SmoothError
from boxcal.calibrators.evaluation.verdict import JOINT_LEVEL, Verdict

Floats = NDArray[np.float64]
ZERO = np.log(np.finfo(np.float32).tiny)


def draw(count: int, classes: int, temperature: float, zeros: float, seed: int) -> tuple[Floats, Floats]:
    """Draw logits `temperature` times too large; a share of the true classes is given probability 0."""
    rng = np.random.default_rng(seed)
    honest = 2.5 * rng.normal(size=(count, classes))
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(axis=1)
    logits = temperature * honest
    lost = rng.random(count) < zeros
    logits[lost, labels[lost]] = ZERO
    return logits, labels


def judged(method: str, logits: Floats, labels: Floats, seed: int) -> tuple[bool, bool]:
    """Say what this gate and the earlier one decide."""
    data = check_validation_set(logits, labels)
    answers = cross_fit(method, data, seed=seed)
    after = outcomes(answers.probabilities, labels, answers.predicted)
    before = outcomes(torch.softmax(data.scores, dim=1), labels, data.scores.argmax(dim=1))
    columns = np.column_stack([after.nll - before.nll, after.brier - before.brier])
    (earlier, _) = mean_estimates(columns, seed=seed)
    nll, brier = mean_estimates(columns, level=JOINT_LEVEL, seed=seed)
    without = Verdict("uncalibrated", {"nll": nll, "brier": brier})
    if not without.is_better:  # then smooth ECE, which takes longest, decides nothing
        return False, earlier.high < 0
    smooth = _deviations(after, seed).minus(_deviations(before, seed), JOINT_LEVEL)
    verdict = Verdict("uncalibrated", {**without.differences, "smooth_ece": smooth})
    return verdict.is_better, earlier.high < 0


def _deviations(scored: Outcomes, seed: int) -> Deviations:
    return deviations_of([SmoothError(scored)], len(scored), draws=DRAWS, seed=seed)["smooth_ece"]


WORLDS = {
    "nothing to gain (T = 1)": (1.0, 0.0),
    "T = 1.1": (1.1, 0.0),
    "T = 1.25": (1.25, 0.0),
    "T = 1.5": (1.5, 0.0),
    "2 % zeros": (1.0, 0.02),
}


def main() -> None:
    """Simulate, and print a row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=500)
    parser.add_argument(
        "--others", type=int, default=100, help="simulations of worlds with something to gain"
    )
    parser.add_argument("--samples", type=int, nargs="+", default=[300, 1000, 5000])
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--methods", nargs="+", default=["ts"])
    arguments = parser.parse_args()
    print("| world | method | K | N | simulations | activated by this gate | by the earlier gate |")
    print("|---|---|---|---|---|---|---|")
    for world, (temperature, zeros) in WORLDS.items():
        total = arguments.simulations if world.startswith("nothing") else arguments.others
        for method in arguments.methods:
            for classes in arguments.classes:
                for count in arguments.samples:
                    decisions = np.array(
                        [
                            judged(method, *draw(count, classes, temperature, zeros, seed), seed)
                            for seed in range(total)
                        ]
                    )
                    now, earlier = decisions.mean(axis=0)
                    cells = [world, f"`{method}`", str(classes), str(count), str(total)]
                    print(f"| {' | '.join(cells)} | {now:.1%} | {earlier:.1%} |", flush=True)


if __name__ == "__main__":
    main()
