"""`auto`: the method is chosen by cross-validated NLL, and the plainer one is taken where two are as good.

All candidates are compared on one fold first. Those that could still be the best run on every fold of two
repetitions; then the best of them is tried with bounds added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calibrators.data import ValidationSet
from calibrators.fitting.fitter import fit_checked
from calibrators.fitting.result import FitResult, Progress
from calibrators.logit_maps.identity import Identity
from calibrators.method import ADDITIONS, BOUND_MAPS, LOGIT_MAPS, catalogue, parse

FOLDS, REPETITIONS = 5, 2
FINALISTS = 4
"""How many candidates at most run on every fold, before bounds are added."""
Losses = np.ndarray[Any, Any]


def fold_of_each(labels: Tensor, folds: int, seed: int) -> np.ndarray[Any, Any]:
    """Assign every sample to a fold at random, every class evenly."""
    rng = np.random.default_rng(seed)
    order = np.lexsort((rng.random(len(labels)), labels.numpy()))
    assigned = np.empty(len(labels), dtype=np.int64)
    assigned[order] = np.arange(len(labels)) % folds
    return assigned


def candidates(data: ValidationSet) -> list[str]:
    """List what the data allow, from the plainest to the most elaborate."""
    given = {"logits"}
    if data.features is not None and data.head is not None:
        given.add("features")
    if data.inputs is not None and data.backbone is not None:
        given.add("inputs")
    maps = [one.name for one in LOGIT_MAPS if one.reads in given]
    return [Identity.name, *BOUND_MAPS, *maps[1:]]


class _Comparison:
    """Cross-validated losses of methods on one set, each computed once."""

    def __init__(self, data: ValidationSet, seed: int) -> None:
        self.data, self.seed = data, seed
        self.folds = min(FOLDS, len(data))
        self.parts = [
            torch.from_numpy(fold_of_each(data.labels, self.folds, seed + repetition) == index)
            for repetition in range(REPETITIONS)
            for index in range(self.folds)
        ]
        self.losses: dict[str, dict[int, Losses]] = {}

    def run(self, name: str, part: int) -> Losses:
        """Fit outside a part and give the losses inside it."""
        known = self.losses.setdefault(name, {})
        if part not in known:
            inside = self.parts[part]
            calibrator = fit_checked(name, self.data.rows(~inside), seed=self.seed).calibrator
            unseen = self.data.rows(inside)
            logits = calibrator.logit_map.source(unseen) if calibrator.reads == "features" else unseen.scores
            if calibrator.input_shift is not None and unseen.inputs is not None and unseen.backbone:
                with torch.no_grad():
                    logits = unseen.backbone((unseen.inputs + calibrator.input_shift).float())
            own = calibrator(logits).gather(1, unseen.labels[:, None])[:, 0]
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
    names = candidates(data)
    report = progress or (lambda fraction, stage: None)
    for place, name in enumerate(names):
        report(0.3 * place / len(names), f"trying {name}")
        comparison.run(name, 0)
    finalists = _promising(comparison, names)
    _run_all(comparison, finalists, report, 0.3, 0.6)
    leader = min(finalists, key=lambda name: comparison.all_losses(name).mean())
    base = parse(leader).logit_map.name
    more = [name for addition in ADDITIONS if (name := f"{base}+{addition}") in catalogue()]
    _run_all(comparison, more, report, 0.6, 0.9)
    chosen, choice = _plainest_of_the_best(comparison, _by_plainness([*finalists, *more]))
    result = fit_checked(
        chosen, data, seed=seed, progress=lambda fraction, stage: report(0.9 + 0.1 * fraction, stage)
    )
    return FitResult(result.calibrator, chosen, result.nll, result.certificate, result.seconds, choice)


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
    """Keep `uncalibrated`, and those that come within two standard errors of the best on the first fold."""
    first = {name: comparison.run(name, 0) for name in names}
    ranked = sorted(names, key=lambda name: first[name].mean())
    best = first[ranked[0]]
    close = [name for name in ranked if first[name].mean() - best.mean() <= 2.0 * _error(first[name] - best)]
    return [name for name in names if name == Identity.name or name in close[:FINALISTS]]


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
