"""How often the gate activates a calibrator by simulation, beside the gate of version 0.1.

`python -m benchmarks.gate [--simulations 500] [--samples 300 1000 5000] [--classes 10 100] [--worlds T=1]`

Every simulation cross-fits a method and asks two gates: this one (NLL significantly lower, neither Brier
score nor smooth ECE significantly higher, in bounds that hold together), and that of version 0.1 (the 95 %
interval of the NLL difference below 0). Where this gate activates, the method is fitted to all samples, and
its expected NLL under the true probabilities of 5,000 new samples says whether it is truly worse than none.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
from numpy.typing import NDArray

from boxcal.calibrators import fit
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.evaluation.bootstrap import Deviations, Resamples, deviations_of, mean_estimates
from boxcal.calibrators.evaluation.crossfit import cross_fit
from boxcal.calibrators.evaluation.outcomes import Outcomes, outcomes
from boxcal.calibrators.evaluation.toplabel import SmoothError
from boxcal.calibrators.evaluation.verdict import LEVELS, Verdict

Floats = NDArray[np.float64]
ZERO = np.log(np.finfo(np.float32).tiny)
NEW_SAMPLES = 5000

WORLDS = {
    "T=1": (1.0, 0.0),
    "T=1.05": (1.05, 0.0),
    "T=1.1": (1.1, 0.0),
    "T=1.25": (1.25, 0.0),
    "T=1.5": (1.5, 0.0),
    "zeros": (1.0, 0.02),
}
"""How many times too large the logits are, and the share of the true classes with probability 0."""


def draw(
    count: int, classes: int, temperature: float, zeros: float, seed: int
) -> tuple[Floats, Floats, Floats]:
    """Draw logits (N, K), labels (N,) and the true probabilities (N, K)."""
    rng = np.random.default_rng(seed)
    honest = 2.5 * rng.normal(size=(count, classes))
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(axis=1)
    logits = temperature * honest
    lost = rng.random(count) < zeros
    logits[lost, labels[lost]] = ZERO
    return logits, labels, torch.from_numpy(honest).softmax(dim=1).numpy()


def judged(method: str, world: str, count: int, classes: int, seed: int) -> tuple[bool, bool, bool]:
    """Say what this gate and the earlier one decide, and whether this one activates a truly worse fit."""
    logits, labels, _ = draw(count, classes, *WORLDS[world], seed)
    data = check_validation_set(logits, labels)
    answers = cross_fit(method, data, seed=seed)
    after = outcomes(answers.probabilities, labels, answers.predicted)
    before = outcomes(torch.softmax(data.scores, dim=1), labels, data.scores.argmax(dim=1))
    resamples = Resamples(len(after), seed=seed)
    (nll,) = mean_estimates((after.nll - before.nll)[:, None], resamples, level=LEVELS["nll"])
    (brier,) = mean_estimates((after.brier - before.brier)[:, None], resamples, level=LEVELS["brier"])
    without = Verdict("uncalibrated", {"nll": nll, "brier": brier})
    if not without.is_better:  # then smooth ECE, which takes longest, decides nothing
        return False, nll.high < 0, False
    smooth = _deviations(after, resamples).minus(_deviations(before, resamples), LEVELS["smooth_ece"])
    is_better = Verdict("uncalibrated", {**without.differences, "smooth_ece": smooth}).is_better
    return is_better, nll.high < 0, is_better and _truly_worse(method, world, logits, labels, seed)


def _truly_worse(method: str, world: str, logits: Floats, labels: Floats, seed: int) -> bool:
    new, drawn, true = draw(NEW_SAMPLES, logits.shape[1], *WORLDS[world], seed + 1_000_000)
    raw = torch.from_numpy(new)
    own = fit(method, logits, labels).calibrator(raw)
    if WORLDS[world][1]:  # the zeros depend on the labels, so only these can judge
        true = np.eye(logits.shape[1])[drawn]
    gains = (own.clamp_min(1e-300).log() - raw.log_softmax(dim=1)).numpy()
    return bool((true * gains).sum(axis=1).mean() < 0)


def _deviations(scored: Outcomes, resamples: Resamples) -> Deviations:
    return deviations_of([SmoothError(scored)], resamples)["smooth_ece"]


def main() -> None:
    """Simulate, and print a row for each setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--simulations", type=int, default=500)
    parser.add_argument("--samples", type=int, nargs="+", default=[300, 1000, 5000])
    parser.add_argument("--classes", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--methods", nargs="+", default=["ts"])
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), choices=WORLDS)
    arguments = parser.parse_args()
    print("| world | method | K | N | simulations | activated | earlier gate | activated and truly worse |")
    print("|---|---|---|---|---|---|---|---|")
    for world in arguments.worlds:
        for method in arguments.methods:
            for classes in arguments.classes:
                for count in arguments.samples:
                    decisions = np.array(
                        [judged(method, world, count, classes, seed) for seed in range(arguments.simulations)]
                    )
                    cells = [world, f"`{method}`", str(classes), str(count), str(arguments.simulations)]
                    cells += [f"{share:.1%}" for share in decisions.mean(axis=0)]
                    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
