"""`auto`: the method of lowest cross-validated NLL, or the unchanged logits where none is better.

Every candidate is fitted on one fold first. All that are not far behind run on every fold of two repetitions,
networks only where they lead; then the best is tried with bounds added. The choice has seen every sample, so
the gain of the best is overstated: the bootstrap bias correction of Tsamardinos, Greasidou and Borboudakis
(2018) says by how much, from the losses already computed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from boxcal.calibrators.checks import absent_classes
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.duplicates import row_groups
from boxcal.calibrators.fitting.fitter import fit_checked
from boxcal.calibrators.fitting.result import FitResult, Progress
from boxcal.calibrators.folds import fold_of_each
from boxcal.calibrators.logit_maps.identity import Identity
from boxcal.calibrators.method import ADDITIONS, catalogue, parse

FOLDS, REPETITIONS = 5, 2
BUDGET_SECONDS = 120.0
"""How long candidates are compared, unless the caller says otherwise."""
TOLERANCE = 1e-5
"""Nats below which two cross-validated losses count as equal."""
REGULARISED = {"vector", "sms", "dirichlet", "matrix"}
"""Methods with parameters per class that a penalty keeps near a temperature."""
SAMPLES_PER_PARAMETER = 10
"""Needed by other methods with parameters per class."""
SAMPLES_PER_CLASS = 10
"""Needed by regularised methods."""
MOST_PARAMETERS = 5
"""Per sample, of a regularised method: larger ones take minutes to fit, and do no better on new data."""
BEATEN = 5.0
"""Standard errors behind the best of the first fold, from which a candidate need not run on the others."""
CLOSE = 1e-3
"""Nats behind the best of the first fold, up to which a candidate runs on the others in any case."""
RESAMPLES = 500
Losses = NDArray[np.float64]


class _OutOfTime(Exception):
    """The budget was used up during a fit."""


def candidates(data: ValidationSet) -> list[str]:
    """List what the data allow, by number of parameters, networks last, without combinations.

    Methods with parameters per class need a sample of every class, and enough samples for their parameters.
    """
    given = {"logits"}
    if data.features is not None and data.head is not None:
        given.add("features")
    if data.inputs is not None and data.backbone is not None:
        given.add("inputs")
    has_all = not len(absent_classes(data.labels.numpy(), data.num_classes))
    return _by_plainness(
        [
            name
            for name, one in catalogue().items()
            if "+" not in name
            and one.logit_map.reads in given
            and (not one.is_per_class or (has_all and _has_enough(name, data)))
        ],
        data.num_classes,
    )


def _has_enough(name: str, data: ValidationSet) -> bool:
    """Whether there are samples enough for a method with parameters per class not to do harm."""
    parameters, count = parse(name).num_parameters(data.num_classes), len(data)
    if name not in REGULARISED:
        return count >= SAMPLES_PER_PARAMETER * parameters
    return count >= SAMPLES_PER_CLASS * data.num_classes and parameters <= MOST_PARAMETERS * count


def _by_plainness(names: Sequence[str], num_classes: int) -> list[str]:
    order = list(catalogue())

    def rank(name: str) -> tuple[bool, int, int]:
        one = parse(name)
        return one.is_network, one.num_parameters(num_classes), order.index(name)

    return sorted(names, key=rank)


class _Comparison:
    """Cross-validated losses of methods on one set, each computed once, until the time is over.

    Parameters
    ----------
    deadline : float
        Of `time.monotonic`.
    tell : callable
        Called with what is being done.
    """

    def __init__(self, data: ValidationSet, seed: int, deadline: float, tell: Callable[[str], None]) -> None:
        self.data, self.seed, self.deadline, self.tell = data, seed, deadline, tell
        self.folds = min(FOLDS, len(data))
        self.parts = [
            torch.from_numpy(fold_of_each(data, self.folds, seed + repetition) == index)
            for repetition in range(REPETITIONS)
            for index in range(self.folds)
        ]
        self.parts = [part for part in self.parts if 0 < part.sum() < len(data)]
        self.losses: dict[str, dict[int, Losses]] = {}
        self.seconds: dict[str, float] = {}

    def run(self, name: str, parts: Sequence[int]) -> bool:
        """Fit outside each part and keep the losses inside it; whether the time was enough."""
        known = self.losses.setdefault(name, {})
        started = time.monotonic()
        try:
            for part in parts:
                if part not in known:
                    self.tell(f"comparing {name}, fold {part + 1} of {len(self.parts)}")
                    known[part] = self._losses(name, self.parts[part])
        except _OutOfTime:
            return False
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started
        return True

    def first(self, name: str) -> Losses:
        """NLL of the samples of the first fold."""
        return self.losses[name][0][:, 0]

    def finished(self, names: Sequence[str]) -> list[str]:
        """Those that have run on every fold."""
        return [name for name in names if len(self.losses.get(name, {})) == len(self.parts)]

    def all_losses(self, name: str) -> Losses:
        """NLL and Brier score (N, 2), means over repetitions, each in a fold that the fit had not seen."""
        total, count = np.zeros((len(self.data), 2)), np.zeros((len(self.data), 1))
        for part, losses in self.losses[name].items():
            inside = self.parts[part].numpy()
            total[inside] += losses
            count[inside] += 1
        result: Losses = total / count
        return result

    def _losses(self, name: str, inside: torch.Tensor) -> Losses:
        def watch(fraction: float, stage: str) -> None:
            del fraction, stage
            if name != Identity.name and time.monotonic() > self.deadline:
                raise _OutOfTime

        used, unseen = self.data.rows(~inside), self.data.rows(inside)
        calibrator = fit_checked(name, used, seed=self.seed, thorough=False, progress=watch).calibrator
        probabilities = calibrator(calibrator.source(unseen))
        own = probabilities.gather(1, unseen.labels[:, None])[:, 0]
        nll = -own.clamp_min(torch.finfo(torch.float64).tiny).log()
        brier = probabilities.square().sum(dim=1) - 2 * own + 1
        return torch.stack([nll, brier], dim=1).numpy()


def choose(
    data: ValidationSet,
    *,
    seed: int,
    progress: Progress | None,
    budget_seconds: float = BUDGET_SECONDS,
) -> FitResult:
    """Choose a method for the data and fit it to all of them.

    The lowest cross-validated NLL names the method; of those within `TOLERANCE` of it the one with the fewest
    parameters is taken. `uncalibrated` stays unless the choice is better after bias correction. After
    `budget_seconds` the best of what was compared is taken.
    """
    report = progress or (lambda fraction, stage: None)
    started = time.monotonic()
    done = 0.0

    def tell(stage: str) -> None:
        nonlocal done
        report(done, stage)

    comparison = _Comparison(data, seed, started + budget_seconds, tell)
    names = candidates(data)
    every = range(len(comparison.parts))
    comparison.run(Identity.name, every)
    tried = []
    for place, name in enumerate(names):
        done = 0.2 * place / len(names)
        if comparison.run(name, [0]):
            tried.append(name)
    promising = _promising(comparison, tried)
    for place, name in enumerate(promising):
        done = 0.2 + 0.4 * place / len(promising)
        comparison.run(name, every)
    compared = comparison.finished(names)
    base = parse(_best(comparison, compared)).logit_map.name
    joined = [name for addition in ADDITIONS if (name := f"{base}+{addition}") in catalogue()]
    for place, name in enumerate(joined):
        done = 0.6 + 0.3 * place / len(joined)
        if comparison.run(name, [0]) and _leads(comparison, name, base):
            comparison.run(name, every)
    names += joined
    compared = _by_plainness(comparison.finished(names), data.num_classes)
    chosen, choice = _decide(comparison, compared, names)
    choice |= {"budget_seconds": budget_seconds, "seconds": time.monotonic() - started}
    result = fit_checked(
        chosen, data, seed=seed, progress=lambda fraction, stage: report(0.9 + 0.1 * fraction, stage)
    )
    return replace(result, choice=choice)


def _promising(comparison: _Comparison, names: Sequence[str]) -> list[str]:
    """Keep what is not far behind the best of the first fold; a network must be the best."""
    plain = [name for name in names if not parse(name).is_network]
    best = min(plain, key=lambda name: comparison.first(name).mean())
    kept = []
    for name in names:
        behind = comparison.first(name) - comparison.first(best)
        limit = -_error(behind) if parse(name).is_network else max(CLOSE, BEATEN * _error(behind))
        if behind.mean() <= limit:
            kept.append(name)
    return kept


def _leads(comparison: _Comparison, name: str, base: str) -> bool:
    """Whether a combination beats its base on the first fold; a network by more than a standard error."""
    gain = comparison.first(base) - comparison.first(name)
    return bool(gain.mean() > (_error(gain) if parse(name).is_network else TOLERANCE))


def _best(comparison: _Comparison, names: Sequence[str]) -> str:
    return min(names, key=lambda name: comparison.all_losses(name)[:, 0].mean())


def _decide(comparison: _Comparison, compared: list[str], names: list[str]) -> tuple[str, dict[str, Any]]:
    """Choose among what was compared, the plainest first, and say why."""
    losses = np.stack([comparison.all_losses(name) for name in compared], axis=2)
    nll = losses[:, 0]
    means = dict(zip(compared, nll.mean(axis=0).tolist(), strict=True))
    best = compared[_lowest(nll.mean(axis=0))]
    index, plain = compared.index(best), compared.index(Identity.name)
    bias = _selection_bias(losses, index, row_groups(comparison.data.scores.numpy()))
    gain = nll[:, plain] - nll[:, index]
    corrected, error = float(gain.mean()) - bias["nll"], _error(gain)
    chosen = best if corrected > TOLERANCE else Identity.name
    if best == Identity.name:
        why = "no method has a lower cross-validated NLL than the unchanged logits"
    elif chosen == best:
        why = (
            f"`{best}` has the lowest cross-validated NLL of {len(compared)} methods, {means[best]:.4f}:"
            f" after correction for the choice {corrected:.4f} ± {error:.4f} below the unchanged logits"
        )
    else:
        why = (
            f"`{best}` has the lowest cross-validated NLL, {means[best]:.4f}, but nothing is left of its gain"
            f" over the unchanged logits after correction for the choice: {corrected:.4f} ± {error:.4f}"
        )
    choice = {
        "chosen": chosen,
        "why": why,
        "best": best,
        "candidates": [_candidate(comparison, name, means) for name in dict.fromkeys([*compared, *names])],
        "cross_validated_nll": means,
        "corrected_gain": corrected,
        "selection_bias": bias,
        "folds": comparison.folds,
        "repetitions": REPETITIONS,
    }
    return chosen, choice


def _candidate(comparison: _Comparison, name: str, means: dict[str, float]) -> dict[str, Any]:
    """Give the row of the table of candidates."""
    parts = len(comparison.losses.get(name, {}))
    status = "compared" if name in means else "behind on the first fold" if parts else "no time left"
    if 1 < parts < len(comparison.parts):
        status = "no time left"
    return {
        "method": name,
        "parameters": parse(name).num_parameters(comparison.data.num_classes),
        "nll": means.get(name),
        "status": status,
        "seconds": comparison.seconds.get(name, 0.0),
    }


def _lowest(means: Losses) -> int:
    """Index of the first, which is the plainest, within the tolerance of the lowest."""
    return int(np.argmax(means <= means.min() + TOLERANCE))


def _selection_bias(losses: NDArray[np.float64], chosen: int, groups: NDArray[np.int64]) -> dict[str, float]:
    """Estimate how much too low the chosen method's loss is because it was chosen by it.

    Each resample of the samples chooses anew; samples that it misses judge its choice beside the method
    chosen on all of them (bootstrap bias corrected cross-validation). Copies are resampled together.

    Parameters
    ----------
    losses : float64 (N, 2, C)
        NLL and Brier score of the candidates.
    chosen : int
        Which one was chosen.
    groups : int64 (N,)
        Samples of one number are copies.
    """
    _, group = np.unique(groups, return_inverse=True)
    count = int(group.max()) + 1
    sizes = np.bincount(group).astype(np.float64)
    sums = np.zeros((count, *losses.shape[1:]))
    np.add.at(sums, group, losses)
    rng = np.random.default_rng(0)
    biases = []
    for _ in range(RESAMPLES):
        times = np.bincount(rng.integers(0, count, count), minlength=count)
        out = times == 0
        if not out.any():
            continue
        pick = _lowest(times @ sums[:, 0] / (times @ sizes))
        biases.append((sums[out, :, pick] - sums[out, :, chosen]).sum(axis=0) / sizes[out].sum())
    nll, brier = np.maximum(np.mean(biases, axis=0), 0.0) if biases else (0.0, 0.0)
    return {"nll": float(nll), "brier": float(brier)}


def _error(differences: Losses) -> float:
    """Give the standard error of the mean of paired differences."""
    return float(differences.std()) / math.sqrt(len(differences))
