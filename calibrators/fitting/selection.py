"""`auto`: the methods that the data allow, mixed by weights that the cross-validation chooses.

Each candidate is fitted without each fold, once. The losses on the rows not seen decide everything: the
strength of a penalty, the weights of the stack, which components are worth one. The stack of each fold, whose
strengths and weights the fold has not seen either, judges the result without another fit.

With q_im the probability that method m gives to the label of sample i, by a fit that has not seen it, the
weights maximise `sum_i n_i log sum_m w_m q_im + c log w_best` on the simplex: EM for the proportions of a
mixture, with a pull of c samples towards the method of the lowest loss. c is chosen, and weights are judged,
on the folds that did not take part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators import array_ops
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.checks import (
    DataWarning,
    absent_classes,
    may_miss_classes,
    rare_classes,
    shows_errors,
)
from boxcal.calibrators.data import FOLDS, ValidationSet, fold_masks
from boxcal.calibrators.fitting.constant_box import SAME
from boxcal.calibrators.fitting.fit_method import check_scale, fit_checked, mean_nll, uniform_share
from boxcal.calibrators.fitting.fitted_method import Fitted
from boxcal.calibrators.fitting.penalty_search import StrengthPath, fit_linear
from boxcal.calibrators.fitting.result import Certificate, FitResult, Progress
from boxcal.calibrators.fitting.rows import losses_of, mean_of
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.maps.linear import LinearMap
from boxcal.calibrators.maps.stack import Component, Stack
from boxcal.calibrators.method import MIXED, WITH_MIXTURE, catalogue, parse

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]

MOST, MOST_OF_TWO = 4, 6
"""Components that are kept at most."""
REGULARISED = {"vector", "sms"}
"""Methods with parameters per class that a penalty keeps near a temperature: classes may be absent."""
SAMPLES_PER_PARAMETER = 10
"""Required by other methods with parameters per class."""
SAMPLES_PER_CLASS, ENOUGH = 10, 100
"""Required by regularised methods, of a rare class too; so many samples in all are enough."""
MOST_PARAMETERS, MOST_OF_SMS = 5, 10
"""Per sample, of a regularised method: larger ones take minutes to fit. `sms` tries only three strengths."""
BUDGET_SECONDS = 120.0
"""Processor time for the candidates, unless the caller says otherwise."""
PULLS = (0.0, 1.0, 4.0, 16.0)
"""Samples that pull towards the best method; which of them is cross-validated."""
PASSES, STILL = 300, 1e-5
"""Of EM at most, and the change of every weight at which it ends."""
WORTH = 1e-4
"""Nats that the components left out may cost together."""
SMALLEST = 1e-300
TOLERANCE = 1e-5
"""Nats below which two cross-validated losses count as equal."""


def candidates(data: ValidationSet) -> list[str]:
    """List what is cross-validated on the data, the quickest first.

    Methods with parameters per class need enough samples for their parameters, and of every class: no class
    may be rare. Regularised ones need ten of a rare class, and classes may be absent by chance: where a class
    of 20 in 2,500 is as rare in what follows, they gain as much as with all. Where no predicted label is
    wrong, nothing limits how sharp a method makes the probabilities: the unchanged logits are left.
    """
    if not shows_errors(data.facts, data.labels):
        return [IdentityMap.name]
    listed = []
    here = "of two classes" if data.num_classes == 2 else "of more classes"
    for name, one in catalogue().items():
        if "+" in name or one.bounds or one.logit_map.stacked not in ("always", here):
            continue
        if not one.is_per_class or _has_enough(name, data):
            listed += [name, *([MIXED + name] if name in WITH_MIXTURE else [])]
    readers = _besides(data)
    return listed + [
        name for name, one in catalogue().items() if "+" not in name and one.logit_map.reads in readers
    ]


def _besides(data: ValidationSet) -> set[str]:
    """Say what the samples have besides logits."""
    found = set()
    if data.features is not None and data.head is not None:
        found.add("features")
    if data.inputs is not None and data.backbone is not None:
        found.add("inputs")
    return found


def _has_enough(name: str, data: ValidationSet) -> bool:
    """Whether there are enough samples for a method with parameters per class to do no harm."""
    K, count = data.num_classes, data.effective
    parameters, labels = parse(name).num_parameters(K), data.labels
    rare, complete = rare_classes(labels, K), not len(absent_classes(labels, K))
    if name not in REGULARISED:
        return not len(rare) and complete and count >= SAMPLES_PER_PARAMETER * parameters
    if (np.bincount(labels, minlength=K)[rare] < SAMPLES_PER_CLASS).any():
        return False
    most = MOST_OF_SMS if name == "sms" else MOST_PARAMETERS
    complete = complete or may_miss_classes(len(data), K)
    return complete and count >= min(SAMPLES_PER_CLASS * K, ENOUGH) and parameters <= most * count


@dataclass(frozen=True)
class CrossFitted:
    """One candidate: its losses (N,) on rows that its fits have not seen, and the calibrator of each fold."""

    losses: Floats
    folds: Sequence[ArrayCalibrator]
    path: StrengthPath | None = None


class _Folds:
    """The fits of candidates to the rows outside each fold, each made once."""

    def __init__(self, data: ValidationSet, masks: Sequence[Mask], seed: int) -> None:
        self.data, self.masks, self.seed = data, masks, seed
        self.share = uniform_share(data)
        self._known: list[dict[str, Fitted]] = [{} for _ in (*masks, data)]

    @cached_property
    def mixed(self) -> ValidationSet:
        """The samples with mixtures of the softmax and the uniform distribution in place of the logits."""
        wide = self.data.logits.astype(np.float64)
        return replace(self.data, logits=array_ops.with_uniform(wide, self.share))

    @cached_property
    def _used(self) -> list[ValidationSet]:
        return [self.data.rows(~inside) for inside in self.masks]

    def fit(self, name: str, tick: Callable[[float], None]) -> CrossFitted:
        """Cross-fit a candidate."""
        method = parse(name)
        data = self.mixed if method.mixed else self.data
        if issubclass(method.logit_map, LinearMap) and len(data) >= 2 * FOLDS:
            path = StrengthPath(method.logit_map(data.num_classes), data, self.masks, tick)
            return CrossFitted(path.losses(), [self._calibrator(name, one) for one in path.maps()], path)
        losses, folds = np.empty(len(data)), list[ArrayCalibrator]()
        for place, inside in enumerate(self.masks):
            used = data.rows(~inside) if method.mixed else self._used[place]
            folds.append(self._calibrator(name, self._map(name, used, place)))
            unseen = self.data.rows(inside)
            p = folds[-1](folds[-1].source(unseen))
            own = np.take_along_axis(p, unseen.labels[:, None], axis=1)[:, 0]
            losses[inside] = -np.log(np.maximum(own, np.finfo(np.float64).tiny))
            tick((place + 1) / len(self.masks))
        return CrossFitted(losses, folds)

    def component(self, name: str, found: CrossFitted) -> Component:
        """Fit a candidate to all samples."""
        method = parse(name)
        data = self.mixed if method.mixed else self.data
        if found.path is None:
            return Component(name, self._map(name, data, len(self.masks)), method.mixed)
        logit_map: Any = method.logit_map(data.num_classes)
        logit_map.prepare(data)
        minimum = fit_linear(
            logit_map, data, seed=self.seed, thorough=False, tick=lambda done: None, path=found.path
        )
        return Component(name, logit_map.moved(minimum.coordinates), method.mixed)

    def _map(self, name: str, data: ValidationSet, place: int) -> LogitMap:
        """Fit the map of a method without a penalty's strength."""
        method = parse(name)
        known = self._known[place] if method.logit_map.reads == "logits" and not method.mixed else None
        base = name.removeprefix(MIXED)
        return fit_checked(base, data, seed=self.seed, thorough=False, known=known).on_arrays.logit_map

    def _calibrator(self, name: str, logit_map: LogitMap) -> ArrayCalibrator:
        K, share = self.data.num_classes, self.share if parse(name).mixed else 0.0
        return ArrayCalibrator(name, logit_map, ConstantBounds(K), K, uniform_share=share)

    def stack(self, components: Sequence[Component], weights: Floats) -> ArrayCalibrator:
        """Give the calibrator of components, or of the only one."""
        if len(components) == 1:
            return self._calibrator(components[0].method, components[0].logit_map)
        one = Stack(components, weights / weights.sum(), self.share)
        return ArrayCalibrator(one.method, one, ConstantBounds(one.num_classes), one.num_classes)


def choose(
    data: ValidationSet,
    *,
    seed: int,
    progress: Progress | None,
    budget_seconds: float = BUDGET_SECONDS,
) -> FitResult:
    """Fit the stack of the candidates to the data, or the one method that is as good, or none.

    After `budget_seconds` of processor time no further candidate is begun. Methods that read something else
    than logits take no part in a stack: the best of them is taken where it is clearly better.
    """
    report = progress or (lambda fraction, stage: None)
    check_scale(data)
    names, masks = candidates(data), fold_masks(data, FOLDS, seed)
    folds, begun = _Folds(data, masks, seed), time.process_time()
    found: dict[str, CrossFitted] = {}
    seconds: dict[str, float] = {}
    for place, name in enumerate(names if masks else []):
        spent = time.process_time()
        if name != IdentityMap.name and spent - begun > budget_seconds:
            continue

        def tick(done: float, place: int = place, name: str = name) -> None:
            report(0.8 * (place + done) / len(names), f"cross-validating {name}")

        tick(0.0)
        found[name] = folds.fit(name, tick)
        seconds[name] = time.process_time() - spent
    report(0.8, "weighing the methods")
    decision = _decide(data, folds, found)
    candidates_tried = [
        {
            "method": name,
            "parameters": parse(name).num_parameters(data.num_classes),
            "nll": decision.means.get(name),
            "weight": decision.weights.get(name, 0.0),
            "status": "compared" if name in found else "no time left",
            "seconds": seconds.get(name, 0.0),
        }
        for name in names
    ]
    choice = {
        "chosen": decision.chosen,
        "why": decision.why,
        "candidates": candidates_tried,
        "cross_validated_nll": decision.means,
        "gain": decision.gain,
        "gain_error": decision.gain_error,
        "pull": decision.pull,
        "folds": len(masks),
        "budget_seconds": budget_seconds,
    }

    late = [name for name in names if name not in found] if found else []
    warnings = (_late(late, budget_seconds, len(data)),) if late else ()

    def fitting(fraction: float, stage: str) -> None:
        report(0.8 + 0.2 * fraction, stage)

    if len(decision.weights) > 1:
        result = _stacked(data, folds, found, decision, fitting)
        if result is not None:
            choice["chosen"] = result.method
            return replace(result, choice=choice, unseen=decision.unseen, warnings=warnings)
        choice |= {"chosen": IdentityMap.name, "why": f"{decision.why}; but all samples together say no"}
        decision = replace(decision, chosen=IdentityMap.name, unseen=())
    result = fit_checked(decision.chosen, data, seed=seed, progress=fitting)
    return replace(result, choice=choice, unseen=decision.unseen, warnings=warnings)


def _late(names: Sequence[str], budget_seconds: float, samples: int) -> DataWarning:
    message = (
        f"the budget of {budget_seconds:g} s of processor time was used up before"
        f" {', '.join(names)}; a larger `budget_seconds` compares {'them' if len(names) > 1 else 'it'} too"
    )
    return DataWarning("budget_exhausted", "warning", message, samples)


def _stacked(
    data: ValidationSet,
    folds: _Folds,
    found: dict[str, CrossFitted],
    decision: _Decision,
    progress: Progress,
) -> FitResult | None:
    """Fit the components to all samples; None where the stack's NLL is not below that of the logits."""
    components = []
    for place, name in enumerate(decision.weights):
        progress(place / len(decision.weights), f"fitting {name}")
        components.append(folds.component(name, found[name]))
    calibrator = folds.stack(components, np.array(list(decision.weights.values())))
    losses = losses_of(data.scores, data.labels, calibrator.logit_map, calibrator.bound_map)
    nll, uncalibrated = mean_of(losses, data.weights), mean_nll(data)
    progress(1.0, f"fitting {calibrator.method}")
    if nll >= uncalibrated - SAME:
        return None
    certificate = Certificate(
        gradient_norm=math.nan,
        starts=1,
        starts_agreeing=1,
        on_boundary=(),
        uncalibrated_nll=uncalibrated,
        evaluations=0,
        objective=nll,
    )
    return FitResult(calibrator, calibrator.method, nll, certificate, 0.0)


@dataclass(frozen=True)
class _Decision:
    """What the losses on unseen rows say."""

    chosen: str
    weights: dict[str, float]  # Of the components of the answer
    means: dict[str, float]
    gain: float  # Mean NLL of the logits less that of the answer, nats, and its standard error
    gain_error: float
    why: str
    pull: float = 0.0
    unseen: tuple[tuple[Mask, ArrayCalibrator], ...] = ()


def _decide(data: ValidationSet, folds: _Folds, found: dict[str, CrossFitted]) -> _Decision:
    plain = IdentityMap.name
    counts = np.ones(len(data)) if data.weights is None else data.weights
    means = {name: float(np.average(one.losses, weights=counts)) for name, one in found.items()}
    if not shows_errors(data.facts, data.labels):
        why = (
            "no predicted label is wrong, so nothing limits how sharp a method makes the probabilities:"
            " the logits stay unchanged"
        )
        return _Decision(plain, {plain: 1.0}, means, 0.0, 0.0, why)
    if len(found) < 2:
        why = "no other method was compared: the logits stay unchanged"
        return _Decision(plain, {plain: 1.0}, means, 0.0, 0.0, why)
    stacked = [name for name in found if parse(name).logit_map.reads == "logits"]
    others = sorted(found.keys() - stacked, key=means.__getitem__)
    weights = stack_weights(
        np.stack([found[name].losses for name in stacked], axis=1),
        np.argmax(folds.masks, axis=0),
        counts,
        MOST_OF_TWO if data.num_classes == 2 else MOST,
    )
    used = {name: w for name, w in zip(stacked, weights.all_rows.tolist(), strict=True) if w > 0}
    losses = weights.losses
    if others:
        mean, error = _mean_and_error(losses - found[others[0]].losses, data)
        if mean > max(error, TOLERANCE):
            used, losses = {others[0]: 1.0}, found[others[0]].losses
    gain, error = _mean_and_error(found[plain].losses - losses, data)
    if len(used) == 1:  # the plainest of those that are as good
        size = {name: parse(name).num_parameters(data.num_classes) for name in stacked}
        (name,) = used
        equal = [one for one in size if means[one] <= means[name] + WORTH]
        used = used if name in others else {min([name, *equal], key=size.__getitem__): 1.0}
        (name,) = used
    shown = ", ".join(
        f"{share:.2f} `{name}`" for name, share in sorted(used.items(), key=lambda one: -one[1])
    )
    best = min(means, key=means.__getitem__)
    behind, behind_error = _mean_and_error(found[best].losses - losses, data)
    if used.keys() == {plain}:
        why = (
            f"no mixture of {len(found)} methods is clearly better on unseen folds than the unchanged logits:"
            f" NLL {-gain:+.4f} ± {error:.4f}"
        )
        return _Decision(plain, used, means, gain, error, why, weights.pull)
    if len(used) == 1:
        why = (
            f"`{name}` is as good as any mixture of {len(found)} methods: {gain:.4f} ± {error:.4f} nats below"
            " the unchanged logits on unseen folds"
        )
    else:
        why = (
            f"a mixture of {shown} is {gain:.4f} ± {error:.4f} nats below the unchanged logits on unseen"
            f" folds; `{best}`, the best method alone, {behind:+.4f} ± {behind_error:.4f} above it"
        )
    unseen = []
    for fold, inside in enumerate(folds.masks):
        own = dict(zip(stacked, weights.by_fold[fold].tolist(), strict=True))
        shares = (
            used if used.keys() & set(others) else {name: share for name, share in own.items() if share > 0}
        )
        parts = [Component(name, found[name].folds[fold].logit_map, parse(name).mixed) for name in shares]
        unseen.append((inside, folds.stack(parts, np.array(list(shares.values())))))
    chosen = next(iter(used)) if len(used) == 1 else "stack"
    return _Decision(chosen, used, means, gain, error, why, weights.pull, tuple(unseen))


def _mean_and_error(values: Floats, data: ValidationSet) -> tuple[float, float]:
    """Give the mean of differences of losses (N,), and its standard error; rows of a group count together."""
    weights = np.ones(len(data)) if data.weights is None else data.weights
    mean = float(np.average(values, weights=weights))
    parts: Any = weights * (values - mean)
    if data.units is not None:
        parts = np.bincount(data.units, weights=parts)
    return mean, float(np.sqrt((parts**2).sum()) / weights.sum())


@dataclass(frozen=True)
class StackWeights:
    """Weights of M methods from all samples, (M,), and without each of F folds, (F, M)."""

    all_rows: Floats
    by_fold: Floats
    pull: float
    losses: Floats  # (N,), of the mixture by the weights of the fold's own, in nats


def stack_weights(losses: Floats, fold_of: NDArray[Any], counts: Floats, most: int) -> StackWeights:
    """Give the weights of a stack, of at most so many components.

    `losses`: (N, M), of M methods on samples that they have not seen, in nats. `fold_of`: (N,), from 0.
    `counts`: (N,), how much each sample counts.
    """
    folds = int(fold_of.max()) + 1
    likelihoods = np.maximum(np.exp(-losses), SMALLEST)
    # A problem for each fold, without its rows, and a last one with all.
    taking = np.append(fold_of[:, None] != np.arange(folds), np.ones((len(losses), 1), bool), axis=1)
    taken = taking * counts[:, None]
    best = (taken.T @ losses).argmin(axis=1)
    towards = np.eye(losses.shape[1])[best].T
    found = [_em(likelihoods, taken, pull * towards, np.ones_like(towards)) for pull in PULLS]
    scores = np.array([_fold_losses(likelihoods, one[:, :folds], fold_of, counts) for one in found])
    chosen = np.append(
        (scores.sum(axis=1, keepdims=True) - scores).argmin(axis=0), scores.sum(axis=1).argmin()
    )
    weights = np.stack([found[index][:, place] for place, index in enumerate(chosen)], axis=1)
    weights = _pruned(likelihoods, taken, np.array(PULLS)[chosen] * towards, weights, most)
    return StackWeights(
        weights[:, folds],
        weights[:, :folds].T,
        PULLS[chosen[folds]],
        -np.log((likelihoods * weights[:, fold_of].T).sum(axis=1)),
    )


def _em(likelihoods: Floats, counts: Floats, pulls: Floats, weights: Floats) -> Floats:
    """Maximise over the weights (M, P) of P problems at once, from those given; a weight of 0 stays."""
    weights = weights / weights.sum(axis=0)
    totals = counts.sum(axis=0) + pulls.sum(axis=0)
    for _ in range(PASSES):
        shares = counts / np.maximum(likelihoods @ weights, SMALLEST)
        moved = (weights * (likelihoods.T @ shares) + pulls) / totals
        change = np.abs(moved - weights).max()
        weights = moved
        if change < STILL:
            break
    found: Floats = weights / weights.sum(axis=0)
    return found


def _fold_losses(likelihoods: Floats, weights: Floats, fold_of: NDArray[Any], counts: Floats) -> Floats:
    """Sum, for each fold, the losses under the weights (M, F) that were found without it."""
    own = (likelihoods * weights[:, fold_of].T).sum(axis=1)
    losses = counts * -np.log(np.maximum(own, SMALLEST))
    return np.bincount(fold_of, weights=losses).astype(np.float64)


def _pruned(likelihoods: Floats, counts: Floats, pulls: Floats, weights: Floats, most: int) -> Floats:
    """Leave out the smallest weights while this costs little, and where there are more than `most`."""

    def mean_losses(weights: Floats) -> Any:
        logs = -np.log(np.maximum(likelihoods @ weights, SMALLEST))
        return (counts * logs).sum(axis=0) / counts.sum(axis=0)

    start, going = mean_losses(weights), np.ones(weights.shape[1], bool)
    places = np.arange(weights.shape[1])
    for _ in range(len(weights) - 1):
        left = (weights > 0).sum(axis=0)
        smallest = np.where(weights > 0, weights, np.inf).argmin(axis=0)
        tried, pulled = weights.copy(), pulls.copy()
        tried[smallest, places] = np.where(going & (left > 1), 0.0, tried[smallest, places])
        pulled[tried == 0.0] = 0.0
        tried = _em(likelihoods, counts, pulled, tried)
        going &= (left > 1) & ((left > most) | (mean_losses(tried) < start + WORTH))
        if not going.any():
            break
        weights, pulls = np.where(going, tried, weights), np.where(going, pulled, pulls)
    return weights
