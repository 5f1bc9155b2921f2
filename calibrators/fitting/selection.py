"""`auto`: the method is chosen by cross-validated NLL, and the plainer one is taken where two are as good.

All candidates are compared on one fold first. The best few of them run on every fold of two repetitions; then
the best is tried with bounds added, which run on if they gain on the first fold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.fitting.fitter import fit_checked
from boxcal.calibrators.fitting.result import FitResult, Progress
from boxcal.calibrators.folds import fold_of_each
from boxcal.calibrators.logit_maps.identity import Identity
from boxcal.calibrators.logit_maps.temperature import TemperatureScaling
from boxcal.calibrators.method import ADDITIONS, BOUND_MAPS, catalogue, parse

FOLDS, REPETITIONS = 5, 2
MOST_PARAMETERS = 5
"""Per sample: matrices of more take minutes to fit, and do no better on new data than a factor per class."""
FINALISTS = 3
"""How many candidates run on every fold, before bounds are added."""
BEATEN = 5.0
"""Standard errors behind the best of the first fold, from which a candidate need not run on the others."""
Losses = np.ndarray[Any, Any]


def candidates(data: ValidationSet) -> list[str]:
    """List what the data allow, without combinations and without maps far larger than the data."""
    given = {"logits"}
    if data.features is not None and data.head is not None:
        given.add("features")
    if data.inputs is not None and data.backbone is not None:
        given.add("inputs")
    return [
        name
        for name, one in catalogue().items()
        if "+" not in name
        and one.logit_map.reads in given
        and one.logit_map(data.num_classes).size <= MOST_PARAMETERS * len(data)
    ]


class _Comparison:
    """Cross-validated losses of methods on one set, each computed once."""

    def __init__(self, data: ValidationSet, seed: int) -> None:
        self.data, self.seed = data, seed
        self.folds = min(FOLDS, len(data))
        self.parts = [
            torch.from_numpy(fold_of_each(data, self.folds, seed + repetition) == index)
            for repetition in range(REPETITIONS)
            for index in range(self.folds)
        ]
        self.losses: dict[str, dict[int, Losses]] = {}

    def run(self, name: str, part: int) -> Losses:
        """Fit outside a part and give the losses inside it."""
        known = self.losses.setdefault(name, {})
        if part not in known:
            inside = self.parts[part]
            used = self.data.rows(~inside)
            calibrator = fit_checked(name, used, seed=self.seed, thorough=False).calibrator
            unseen = self.data.rows(inside)
            own = calibrator(calibrator.source(unseen)).gather(1, unseen.labels[:, None])[:, 0]
            known[part] = -own.clamp_min(torch.finfo(torch.float64).tiny).log().numpy()
        return known[part]

    def all_losses(self, name: str) -> Losses:
        """Mean loss of every sample over the repetitions, each time in a fold that the fit had not seen."""
        total = np.zeros(len(self.data))
        for part, inside in enumerate(self.parts):
            total[inside.numpy()] += self.run(name, part) / REPETITIONS
        return total


def choose(data: ValidationSet, *, seed: int, progress: Progress | None) -> FitResult:
    """Choose a method for the data and fit it to all of them.

    The lowest cross-validated NLL names the best; of the candidates whose paired difference to it is within
    one standard error, the plainest is taken; and `uncalibrated` stays unless the choice beats it by two.
    """
    comparison = _Comparison(data, seed)
    report = progress or (lambda fraction, stage: None)
    names = candidates(data)
    for place, name in enumerate(names):
        report(0.35 * place / len(names), f"trying {name}")
        comparison.run(name, 0)
    finalists = _promising(comparison, names)
    _run_all(comparison, finalists, report, 0.35, 0.6)
    base = parse(min(finalists, key=lambda name: comparison.all_losses(name).mean())).logit_map.name
    joined = [name for addition in ADDITIONS if (name := f"{base}+{addition}") in catalogue()]
    for place, name in enumerate(joined):
        report(0.6 + 0.15 * place / len(joined), f"trying {name}")
        comparison.run(name, 0)
    joined = _better_than(comparison, joined, base)
    _run_all(comparison, joined, report, 0.75, 0.9)
    chosen, choice = _plainest_of_the_best(comparison, _by_plainness([*finalists, *joined]))
    result = fit_checked(
        chosen, data, seed=seed, progress=lambda fraction, stage: report(0.9 + 0.1 * fraction, stage)
    )
    return replace(result, choice=choice)


def _run_all(
    comparison: _Comparison, names: Sequence[str], report: Progress, begin: float, end: float
) -> None:
    """Run methods on every fold."""
    steps = [(name, part) for name in names for part in range(len(comparison.parts))]
    for index, (name, part) in enumerate(steps):
        share = begin + (end - begin) * index / len(steps)
        report(share, f"comparing {name}, fold {part + 1} of {len(comparison.parts)}")
        comparison.run(name, part)


def _promising(comparison: _Comparison, names: Sequence[str]) -> list[str]:
    """Keep those that did best on the first fold, beside `uncalibrated` and the plainest method there is."""
    ranked = sorted(names, key=lambda name: comparison.run(name, 0).mean())[:FINALISTS]
    behind = {name: comparison.run(name, 0) - comparison.run(ranked[0], 0) for name in ranked}
    close = [name for name, losses in behind.items() if losses.mean() <= BEATEN * _error(losses)]
    kept = {Identity.name, TemperatureScaling.name, *close}
    return [name for name in names if name in kept]


def _better_than(comparison: _Comparison, names: Sequence[str], plain: str) -> list[str]:
    """Keep those that beat the plain method on the first fold by more than a standard error."""
    against = comparison.run(plain, 0)
    gains = {name: against - comparison.run(name, 0) for name in names}
    return [name for name, gain in gains.items() if gain.mean() > _error(gain)]


def _by_plainness(names: Sequence[str]) -> list[str]:
    order = [Identity.name, *BOUND_MAPS, *catalogue()]
    return sorted(dict.fromkeys(names), key=lambda name: (len(name.split("+")), order.index(name)))


def _plainest_of_the_best(comparison: _Comparison, names: Sequence[str]) -> tuple[str, dict[str, Any]]:
    losses = {name: comparison.all_losses(name) for name in names}
    means = {name: float(values.mean()) for name, values in losses.items()}
    best = min(names, key=means.__getitem__)
    chosen = next(name for name in names if means[name] - means[best] <= _error(losses[name] - losses[best]))
    gain = losses[Identity.name] - losses[chosen]
    if gain.mean() <= 2.0 * _error(gain):
        chosen = Identity.name
    choice = {
        "cross_validated_nll": means,
        "best": best,
        "folds": comparison.folds,
        "repetitions": REPETITIONS,
    }
    return chosen, choice


def _error(differences: Losses) -> float:
    """Give the standard error of the mean of paired differences."""
    return float(differences.std()) / math.sqrt(len(differences))
