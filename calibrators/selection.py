"""`auto`: the method is chosen by cross-validated NLL, and the plainer one is taken where two are as good."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from calibrators.fitting.fitter import fit_checked
from calibrators.fitting.result import FitResult, Progress

CANDIDATES = ("uncalibrated", "ts", "pb", "ts+pb", "dpb")
"""From the plainest to the most elaborate."""
FOLDS = 5


def fold_of_each(labels: Tensor, folds: int, seed: int) -> np.ndarray[Any, Any]:
    """Assign every sample to a fold at random, every class evenly."""
    rng = np.random.default_rng(seed)
    order = np.lexsort((rng.random(len(labels)), labels.numpy()))
    assigned = np.empty(len(labels), dtype=np.int64)
    assigned[order] = np.arange(len(labels)) % folds
    return assigned


def choose(
    scores: Tensor, labels: Tensor, *, seed: int, progress: Progress | None, started: float
) -> FitResult:
    """Fit every candidate on the folds, choose one, and fit it to all the data.

    The lowest cross-validated NLL names the best; of the candidates whose paired difference to it is within
    one standard error, the plainest is taken; and `uncalibrated` stays unless the choice beats it by two.
    """
    report = progress or (lambda fraction, stage: None)
    folds = min(FOLDS, len(labels))
    fold = fold_of_each(labels, folds, seed)
    losses = {name: np.empty(len(labels)) for name in CANDIDATES}
    steps = folds * len(CANDIDATES) + 1
    for index in range(folds):
        inside, outside = np.flatnonzero(fold != index), np.flatnonzero(fold == index)
        for place, name in enumerate(CANDIDATES):
            report(
                (index * len(CANDIDATES) + place) / steps, f"comparing {name}, fold {index + 1} of {folds}"
            )
            calibrator, _, _ = fit_checked(name, scores[inside], labels[inside], seed=seed)
            probabilities = calibrator(scores[outside])
            own = probabilities.gather(1, labels[outside][:, None])[:, 0]
            losses[name][outside] = -own.clamp_min(torch.finfo(torch.float64).tiny).log().numpy()
    means = {name: float(values.mean()) for name, values in losses.items()}
    best = min(CANDIDATES, key=means.__getitem__)

    def standard_error(one: str, other: str) -> float:
        return float((losses[one] - losses[other]).std() / len(labels) ** 0.5)

    chosen = next(name for name in CANDIDATES if means[name] - means[best] <= standard_error(name, best))
    if means["uncalibrated"] - means[chosen] <= 2.0 * standard_error("uncalibrated", chosen):
        chosen = "uncalibrated"
    report((steps - 1) / steps, f"fitting {chosen}")
    calibrator, nll, certificate = fit_checked(chosen, scores, labels, seed=seed)
    report(1.0, f"fitted {chosen}")
    choice = {"cross_validated_nll": means, "best": best, "folds": folds}
    return FitResult(calibrator, chosen, nll, certificate, time.perf_counter() - started, choice)
