"""Cross-validated losses of many methods on one validation set, and the bias of a selection by them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.data import ValidationSet, fold_masks
from boxcal.calibrators.fitting.fit_method import fit_checked
from boxcal.calibrators.fitting.fitted_method import Fitted
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.method import parse

FOLDS, REPETITIONS = 5, 2
TOLERANCE = 1e-5
"""Nats below which two cross-validated losses count as equal."""
CLOSE = 1e-3
"""A method at most so many nats worse than another is never excluded because of it."""
FEW = 100
"""Samples below which standard errors are too uncertain to exclude a method."""
RESAMPLES = 500

Losses = NDArray[np.float64]


class _OutOfTime(Exception):
    """The budget was used up during a fit."""


class Comparison:
    """Losses of methods on the folds of repeated cross-validation, each computed at most once.

    `deadline`: of `time.monotonic`; afterwards only `uncalibrated` is computed. `tell`: called with what is
    being done. `parts`: masks (N,) of the folds, one repetition after another.
    """

    def __init__(self, data: ValidationSet, seed: int, deadline: float, tell: Callable[[str], None]) -> None:
        self.data, self.seed, self.deadline, self.tell = data, seed, deadline, tell
        repetitions = [fold_masks(data, FOLDS, seed + repetition) for repetition in range(REPETITIONS)]
        self.first = len(repetitions[0])
        """Number of folds of the first repetition."""
        self.parts = [part for parts in repetitions for part in parts]
        self.seconds: dict[str, float] = {}
        self.late: set[str] = set()
        self._losses: dict[str, dict[int, Losses]] = {}
        self._fitted: list[dict[str, Fitted]] = [{} for _ in self.parts]

    def run(self, name: str, until: int, *, against: str = "", errors: float = math.inf) -> bool:
        """Compute the losses on the first parts, and say whether all are there.

        The run ends early after the deadline, and where the method is worse than the method `against` by
        more than so many standard errors.
        """
        known = self._losses.setdefault(name, {})
        started = time.monotonic()
        try:
            for part in range(until):
                if part not in known:
                    self.tell(f"comparing {name}, fold {part + 1} of {len(self.parts)}")
                    known[part] = self._losses_of(name, part)
                    if against and self.is_behind(name, against, errors, len(known)):
                        return False
        except _OutOfTime:
            self.late.add(name)
            return False
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started
        return True

    def computed(self, name: str) -> int:
        """Give the number of parts whose losses are there."""
        return len(self._losses.get(name, {}))

    def finished(self, names: Sequence[str]) -> list[str]:
        """Keep the methods that have run on the whole first repetition."""
        return [name for name in names if self.computed(name) >= self.first]

    def difference(self, name: str, other: str, parts: int) -> tuple[float, float]:
        """Mean NLL difference of two methods over the first parts, and its standard error."""
        one, two = (
            np.concatenate([self._losses[each][part] for part in range(parts)]) for each in (name, other)
        )
        paired = one[:, 0] - two[:, 0]
        if self.data.weights is None:
            return float(paired.mean()), standard_error(paired)
        weights = np.concatenate([self.data.weights[one] for one in self.parts[:parts]])
        return weighted_mean(paired, weights), standard_error(paired, weights)

    def is_behind(self, name: str, other: str, errors: float, parts: int) -> bool:
        """Whether a method is worse than another by more than `errors` standard errors and than `CLOSE`."""
        mean, error = self.difference(name, other, parts)
        count = sum(len(self._losses[name][part]) for part in range(parts))
        return count >= FEW and mean > max(CLOSE, errors * error)

    def losses(self, name: str) -> Losses:
        """NLL and Brier score (N, 2), means over repetitions, of fits that had not seen the sample."""
        total, count = np.zeros((len(self.data), 2)), np.zeros((len(self.data), 1))
        for part, losses in self._losses[name].items():
            inside = self.parts[part]
            total[inside] += losses
            count[inside] += 1
        result: Losses = total / count
        return result

    def lowest(self, names: Sequence[str]) -> str:
        """Name the method of the lowest NLL."""
        return min(names, key=lambda name: weighted_mean(self.losses(name)[:, 0], self.data.weights))

    def _losses_of(self, name: str, part: int) -> Losses:
        def watch(fraction: float, stage: str) -> None:
            del fraction, stage
            if name != IdentityMap.name and time.monotonic() > self.deadline:
                raise _OutOfTime

        inside = self.parts[part]
        used, unseen = self.data.rows(~inside), self.data.rows(inside)
        method = parse(name)
        known = self._fitted[part] if method.logit_map.reads == "logits" and not method.mixed else None
        calibrator = fit_checked(
            name, used, seed=self.seed, thorough=False, progress=watch, known=known
        ).on_arrays
        probabilities = calibrator(calibrator.source(unseen))
        own = np.take_along_axis(probabilities, unseen.labels[:, None], axis=1)[:, 0]
        nll = -np.log(np.maximum(own, np.finfo(np.float64).tiny))
        brier = np.square(probabilities).sum(axis=1) - 2 * own + 1
        return np.stack([nll, brier], axis=1)


def weighted_mean(values: Losses, weights: Losses | None) -> Any:
    """Return the mean of values (N, ...) with weights (N,), if there are any."""
    return values.mean(axis=0) if weights is None else weights @ values / weights.sum()


def paired_errors(nll: Losses, tolerated: float, weights: Losses | None = None) -> Losses:
    """Give how far each of C methods may be above each other one and count as equal to it: (C, C).

    So many standard errors of the paired difference of the losses (N, C), at least `TOLERANCE`.
    """
    paired = (nll - nll[:, [other]] for other in range(nll.shape[1]))
    if weights is None:
        errors = np.stack([one.std(axis=0) for one in paired], axis=1) / math.sqrt(len(nll))
    else:
        columns = ([standard_error(column, weights) for column in one.T] for one in paired)
        errors = np.array(list(columns)).T
    result: Losses = np.maximum(TOLERANCE, tolerated * errors)
    return result


def plainest_of_equals(means: Losses, equal: Losses) -> int:
    """Index of the first mean that counts as equal to the lowest, and is not above an earlier one."""
    best = int(means.argmin())
    near = means <= means[best] + equal[:, best]
    undominated = means <= np.minimum.accumulate(means) + TOLERANCE
    return int(np.argmax(near & undominated))


def selection_bias(
    losses: NDArray[np.float64], equal: Losses, groups: NDArray[np.int64], weights: Losses | None = None
) -> dict[str, float]:
    """Estimate by how much the selected method's loss is too low because it was selected by it.

    Bootstrap bias corrected cross-validation (Tsamardinos, Greasidou and Borboudakis 2018): each resample of
    the samples selects anew; samples that it misses judge its selection beside the method selected on all of
    them. Copies are resampled together.

    `losses`: float64 (N, 2, C), NLL and Brier score of the candidates. `groups`: int64 (N,), samples with the
    same number are copies. `weights`: float64 (N,), how much each sample counts.
    """
    chosen = plainest_of_equals(weighted_mean(losses[:, 0], weights), equal)
    _, group = np.unique(groups, return_inverse=True)
    count = int(group.max()) + 1
    sizes = np.bincount(group, weights=weights).astype(np.float64)
    sums = np.zeros((count, *losses.shape[1:]))
    np.add.at(sums, group, losses if weights is None else losses * weights[:, None, None])
    rng = np.random.default_rng(0)
    biases = []
    for _ in range(RESAMPLES):
        times = np.bincount(rng.integers(0, count, count), minlength=count)
        out = times == 0
        if not out.any():
            continue
        pick = plainest_of_equals(times @ sums[:, 0] / (times @ sizes), equal)
        biases.append((sums[out, :, pick] - sums[out, :, chosen]).sum(axis=0) / sizes[out].sum())
    nll, brier = np.maximum(np.mean(biases, axis=0), 0.0) if biases else (0.0, 0.0)
    return {"nll": float(nll), "brier": float(brier)}


def standard_error(values: Losses, weights: Losses | None = None) -> float:
    """Give the standard error of the mean of some values, with weights if there are any."""
    if weights is None:
        return float(values.std()) / math.sqrt(len(values))
    centred = weights * (values - weighted_mean(values, weights))
    return float(np.sqrt((centred**2).sum()) / weights.sum())
