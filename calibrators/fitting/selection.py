"""`auto`: the methods that the data allow, mixed by weights that the cross-validation chooses.

Each candidate is fitted without each fold, once; one that takes long is tried on the first fold before. The
losses on the rows not seen decide everything: the strength of a penalty, the weights of the stack, which
components are worth one. The stack of each fold, whose strengths and weights the fold has not seen either,
judges the result without another fit.

With q_im the probability that method m gives to the label of sample i, by a fit that has not seen it, the
weights maximise `sum_i n_i log sum_m w_m q_im + a sum_m log w_m` on the simplex: the proportions of a
mixture, which few samples leave near equal. They are judged on folds that did not take part.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.checks import (
    DataWarning,
    absent_classes,
    may_miss_classes,
    rare_classes,
)
from boxcal.calibrators.data import FOLDS, ValidationSet, fold_masks
from boxcal.calibrators.fitting.constant_box import SAME
from boxcal.calibrators.fitting.fit_method import check_scale, fit_checked, mean_nll
from boxcal.calibrators.fitting.fitted_method import Fitted
from boxcal.calibrators.fitting.penalty_search import (
    StrengthPath,
    fit_linear,
    map_losses,
    unseen_losses,
)
from boxcal.calibrators.fitting.result import Certificate, FitResult, Progress
from boxcal.calibrators.fitting.rows import losses_of, mean_of
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.chain import Chain
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.ensemble_temperature import EnsembleTemperatureScaling
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.maps.linear import LinearMap, PolynomialScaling
from boxcal.calibrators.maps.mixture import Mixture
from boxcal.calibrators.maps.parameterised_temperature import ParameterisedTemperature
from boxcal.calibrators.maps.parameters import with_products
from boxcal.calibrators.maps.stack import Component, Stack
from boxcal.calibrators.method import MIXED, WITH_MIXTURE, catalogue, parse

Mask = NDArray[np.bool_]
Floats = NDArray[np.float64]

MOST, LEAST_SHARE = 4, 0.05
"""Components that are kept at most, and the smallest weight of one."""
REGULARISED = {"vector", "sms", "dirichlet", "polynomial"}
"""Methods with parameters per class that a penalty keeps near a temperature: classes may be absent."""
SAMPLES_PER_PARAMETER = 10
"""Required by other methods with parameters per class."""
SAMPLES_PER_CLASS, ENOUGH = 10, 100
"""Required by regularised methods, of a rare class too; so many samples in all are enough."""
MOST_PARAMETERS, MOST_OF_SMS = 5, 10
"""Per sample, of a regularised method: larger ones take minutes to fit. `sms` tries only three strengths."""
MOST_CLASSES = {"dirichlet": 20, "polynomial": 10}
"""Of a method that takes long with more."""
SAMPLES_PER_COLUMN, FEWEST, MOST_ENTRIES = 5, 200, 2_000_000
"""Required by `polynomial`, which reads K (K + 3) / 2 columns, and the most numbers that it may read."""
INSTEAD = {"dirichlet": "mix+polynomial", "mix+ts": "sms"}
"""What is not compared where the other is: contained in it, or without a gain beside it."""
WITHOUT_MIXTURE = {"dirichlet"}
"""Methods with parameters per class that a mixture before them makes no better."""
BUDGET_SECONDS = 120.0
"""Processor time for the candidates, unless the caller says otherwise."""
PRIOR = 0.25
"""Samples that count for each method before the first, as if nothing else explained them."""
STEPS, STILL, SHORTEST, INSIDE = 100, 1e-12, 1e-6, 0.99
"""Of Newton's method at most, the gain at which it ends, in nats of a sample, the shortest step, and how much
of a weight one may take away."""
ENOUGH_TO_TELL = 500
"""Samples from which on logits stay unchanged where unseen folds show no gain; of fewer, that is chance."""
WORTH = 1e-4
"""Nats below which a plainer method is as good as the only one that has a weight."""
LAST, MANY_CLASSES = ParameterisedTemperature.name, 50
"""What is tried on the answer of a stack, and of how many classes at least: of fewer it gains nothing."""
FLOOR_SAMPLES = 0.1
"""Spread over all classes beside the samples by a stack, so that none is impossible."""
TOLERANCE = 1e-5
"""Nats below which two cross-validated losses count as equal."""


def candidates(data: ValidationSet) -> list[str]:
    """List what is cross-validated on the data, the quickest first.

    Methods with parameters per class need enough samples for their parameters, and some of every class.
    Regularised ones need ten of a rare class, and classes may be absent by chance: where a class of 20 in
    2,500 is as rare in what follows, they gain as much as with all. Of two classes the others are fitted to
    few events too, and of more `as_traffic`: five of 1,000 refute a model that expects a hundred. Where no
    predicted label is wrong, nothing limits how sharp a method makes the probabilities: the logits are left.
    """
    if not data.shows_errors:
        return [IdentityMap.name]
    listed = []
    here = "of two classes" if data.num_classes == 2 else "of more classes"
    for name, one in catalogue().items():
        if "+" in name or one.bounds or one.logit_map.stacked not in ("always", here):
            continue
        if one.is_per_class and not _has_enough(name, data):
            continue
        mixed = [MIXED + name] if name in WITH_MIXTURE and name not in WITHOUT_MIXTURE else []
        # Parameters per class only with the mixture or only without: no worse, and half the time. But `sms`
        # is worth both: a mixture takes what small probabilities of a network tell.
        is_one = mixed and one.is_per_class and (name != "sms" or data.effective < ENOUGH)
        listed += mixed if is_one else [name, *mixed]
    listed = [name for name in listed if INSTEAD.get(name) not in listed]
    listed.sort(key=lambda name: _takes_long(name, data.num_classes))
    readers = _besides(data)
    return listed + [
        name for name, one in catalogue().items() if "+" not in name and one.logit_map.reads in readers
    ]


def _takes_long(name: str, num_classes: int) -> bool:
    """Whether the fits of a candidate take about as long as those of all others."""
    kind = parse(name).logit_map
    return kind is PolynomialScaling or (kind is EnsembleTemperatureScaling and num_classes >= MANY_CLASSES)


def _besides(data: ValidationSet) -> set[str]:
    """Say what the samples have besides logits."""
    needed = {"features": (data.features, data.head), "inputs": (data.inputs, data.backbone)}
    return {name for name, parts in needed.items() if all(part is not None for part in parts)}


def _has_enough(name: str, data: ValidationSet) -> bool:
    """Whether there are enough samples for a method with parameters per class to do no harm."""
    K, count = data.num_classes, data.effective
    if MOST_CLASSES.get(name, K) < K:
        return False
    parameters, labels = parse(name).num_parameters(K), data.labels
    rare, complete = rare_classes(labels, K), not len(absent_classes(labels, K))
    if name not in REGULARISED:
        return complete and count >= SAMPLES_PER_PARAMETER * parameters
    if data.class_mix != "as_traffic" and (np.bincount(labels, minlength=K)[rare] < SAMPLES_PER_CLASS).any():
        return False
    if name == PolynomialScaling.name:
        columns = with_products(K)
        if not (count >= max(FEWEST, SAMPLES_PER_COLUMN * columns) and len(data) * columns <= MOST_ENTRIES):
            return False
    most = MOST_OF_SMS if name == "sms" else MOST_PARAMETERS
    complete = complete or data.class_mix == "as_traffic" or may_miss_classes(len(data), K)
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
        self.floor = FLOOR_SAMPLES / (data.effective + 1.0)
        self._known: list[dict[str, Fitted]] = [{} for _ in (*masks, data)]

    def _used(self, place: int) -> ValidationSet:
        """Copy the samples of the fits of a fold; after the folds, all."""
        return self.data.rows(~self.masks[place]) if place < len(self.masks) else self.data

    @cached_property
    def _mixtures(self) -> list[Mixture]:
        return [Mixture.of(self._used(place), self.data.effective) for place in range(len(self._known))]

    def _read(self, place: int) -> ValidationSet:
        """Give all samples with what the mixture of a fold makes of the logits."""
        return self.data.with_logits(self._mixtures[place].over(self.data.scores))

    def floored(self, losses: Floats) -> Floats:
        """Give losses, nats, of probabilities in which the uniform distribution has the share `floor`."""
        lowest = self.floor / self.data.num_classes
        return -np.log((1.0 - self.floor) * np.exp(-losses) + lowest)

    def fit(self, name: str, tick: Callable[[float], None]) -> CrossFitted:
        """Cross-fit a candidate."""
        method, data = parse(name), self.data
        if issubclass(method.logit_map, LinearMap) and len(data) >= 2 * FOLDS:
            read = self._read if method.mixed else None
            path = StrengthPath(method.logit_map(data.num_classes), data, self.masks, tick, read)
            found = enumerate(path.maps())
            return CrossFitted(
                path.losses(), [self._calibrator(name, one, place) for place, one in found], path
            )
        losses, folds = np.empty(len(data)), list[ArrayCalibrator]()
        for place, inside in enumerate(self.masks):
            used = self._read(place).rows(~inside) if method.mixed else self._used(place)
            folds.append(self._calibrator(name, self._map(name, used, place), place))
            unseen = self.data.rows(inside)
            losses[inside] = map_losses(folds[-1].logit_map, folds[-1].source(unseen), unseen.labels)
            tick((place + 1) / len(self.masks))
        return CrossFitted(losses, folds)

    def is_promising(self, name: str, found: Mapping[str, CrossFitted]) -> bool:
        """Whether a candidate is worth its time: by no standard error worse than the best on the first fold.

        Only what takes long is asked.
        """
        if not _takes_long(name, self.data.num_classes):
            return True
        method, inside = parse(name), self.masks[0]
        data = self._read(0) if method.mixed else self.data
        weights = None if data.weights is None else data.weights[inside]
        others = (one.losses[inside] for one in found.values())
        best = min(others, key=lambda losses: mean_of(losses, weights))
        if method.logit_map is PolynomialScaling:
            own = unseen_losses(method.logit_map(data.num_classes), data, inside)
        else:
            one, unseen = self._map(name, self._used(0), 0), data.rows(inside)
            own = map_losses(one, one.source(unseen), unseen.labels)
        excess, error = _mean_and_error(own - best, data.rows(inside))
        return excess <= error

    def component(self, name: str, found: CrossFitted) -> Component:
        """Fit a candidate to all samples."""
        method, everything = parse(name), len(self.masks)
        data = self._read(everything) if method.mixed else self.data
        if found.path is None:
            one = self._map(name, data, everything)
            return Component(name, self._calibrator(name, one, everything).logit_map)
        logit_map: Any = method.logit_map(data.num_classes)
        logit_map.prepare(data)
        minimum = fit_linear(
            logit_map, data, seed=self.seed, thorough=False, tick=lambda done: None, path=found.path
        )
        one = logit_map.moved(minimum.coordinates)
        return Component(name, self._calibrator(name, one, everything).logit_map)

    def _map(self, name: str, data: ValidationSet, place: int) -> LogitMap:
        """Fit the map of a method without a penalty's strength."""
        method = parse(name)
        known = self._known[place] if method.logit_map.reads == "logits" and not method.mixed else None
        base = name.removeprefix(MIXED)
        return fit_checked(base, data, seed=self.seed, thorough=False, known=known).on_arrays.logit_map

    def _calibrator(self, name: str, logit_map: LogitMap, place: int) -> ArrayCalibrator:
        """Give the calibrator of a map, behind the mixture of its fold if it has one."""
        first = self._mixtures[place] if parse(name).mixed else None
        K = self.data.num_classes
        return ArrayCalibrator(name, Chain(first, logit_map) if first else logit_map, ConstantBounds(K), K)

    def stack(
        self, components: Sequence[Component], weights: Floats, *, always: bool = False
    ) -> ArrayCalibrator:
        """Give the calibrator of components; of the only one, unless `always`, where this needs no floor."""
        name, one = components[0]
        if always or _is_stack([component.method for component in components]):
            one = Stack(components, weights / weights.sum(), self.floor)
            name = one.method
        return ArrayCalibrator(name, one, ConstantBounds(one.num_classes), one.num_classes)


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
            report(min(0.8, 0.8 * (place + done) / len(names)), f"cross-validating {name}")

        tick(0.0)
        if folds.is_promising(name, found):
            found[name] = folds.fit(name, tick)
        seconds[name] = time.process_time() - spent
    report(0.8, "weighing the methods")
    decision = _decide(data, folds, found)
    late = [name for name in names if name not in seconds] if found else []
    if decision.unseen and _read_logits(decision.weights) and data.num_classes >= MANY_CLASSES:
        if time.process_time() - begun > budget_seconds:
            late.append(f"{LAST} after the mixture")
        else:
            plain = found[IdentityMap.name].losses
            stage = f"cross-validating {LAST}"
            decision = _with_last(data, decision, plain, seed, lambda *_: report(0.8, stage))
    candidates_tried = [
        {
            "method": name,
            "parameters": parse(name).num_parameters(data.num_classes),
            "nll": decision.means.get(name),
            "weight": decision.weights.get(name, 0.0),
            "status": "compared"
            if name in found
            else "worse on the first fold"
            if name in seconds
            else "no time left",
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
        "folds": len(masks),
        "budget_seconds": budget_seconds,
    }

    warnings = (_late(late, budget_seconds, len(data)),) if late else ()

    def fitting(fraction: float, stage: str) -> None:
        report(0.8 + 0.2 * fraction, stage)

    if decision.last is not None or _is_stack(list(decision.weights)):
        result = _stacked(data, folds, found, decision, fitting)
        if result is not None:
            choice["chosen"] = result.method
            return replace(result, choice=choice, unseen=decision.unseen, warnings=warnings)
        choice |= {"chosen": IdentityMap.name, "why": f"{decision.why}; but all samples together say no"}
        for row in candidates_tried:
            row["weight"] = float(row["method"] == IdentityMap.name)
        decision = replace(decision, chosen=IdentityMap.name)
    result = fit_checked(decision.chosen, data, seed=seed, progress=fitting)
    unseen = () if decision.chosen == IdentityMap.name else decision.unseen
    return replace(result, choice=choice, unseen=unseen, warnings=warnings)


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
    weights, last = np.array(list(decision.weights.values())), decision.last
    calibrator = folds.stack(components, weights, always=last is not None)
    calibrator = calibrator if last is None else _followed(calibrator, last)
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


def _is_stack(names: Sequence[str]) -> bool:
    """Whether methods become a stack: several, or one with parameters of each class's own, for its floor."""
    first = parse(names[0])
    return len(names) > 1 or (first.is_per_class and first.logit_map.reads == "logits")


def _read_logits(names: Iterable[str]) -> bool:
    return all(parse(name).logit_map.reads == "logits" for name in names)


@dataclass(frozen=True)
class _Decision:
    """What the losses on unseen rows say."""

    chosen: str
    weights: dict[str, float]  # Of the components of the answer
    means: dict[str, float]
    gain: float  # Mean NLL of the logits less that of the answer, nats, and its standard error
    gain_error: float
    why: str
    unseen: tuple[tuple[Mask, ArrayCalibrator], ...] = ()
    last: LogitMap | None = None  # Follows the stack


def _decide(data: ValidationSet, folds: _Folds, found: dict[str, CrossFitted]) -> _Decision:
    plain = IdentityMap.name
    counts = np.ones(len(data)) if data.weights is None else data.weights
    means = {name: float(np.average(one.losses, weights=counts)) for name, one in found.items()}
    if not data.shows_errors:
        why = (
            "no predicted label is wrong, so nothing limits how sharp a method makes the probabilities:"
            " the logits stay unchanged"
        )
        return _Decision(plain, {plain: 1.0}, means, 0.0, 0.0, why)
    if len(found) < 2:
        why = "no other method was compared: the logits stay unchanged"
        return _Decision(plain, {plain: 1.0}, means, 0.0, 0.0, why)
    stacked = [name for name in found if _read_logits([name])]
    others = sorted(found.keys() - stacked, key=means.__getitem__)
    weights = stack_weights(
        folds.floored(np.stack([found[name].losses for name in stacked], axis=1)),
        np.argmax(folds.masks, axis=0),
        counts,
    )
    used = {name: w for name, w in zip(stacked, weights.all_rows.tolist(), strict=True) if w > 0}
    losses = weights.losses
    if others:
        mean, error = _mean_and_error(losses - found[others[0]].losses, data)
        if mean > max(error, TOLERANCE):
            used, losses = {others[0]: 1.0}, found[others[0]].losses
    gain, error = _mean_and_error(found[plain].losses - losses, data)
    if gain <= 0.0 and data.effective >= ENOUGH_TO_TELL:
        used = {plain: 1.0}
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
    elif len(used) == 1:
        why = (
            f"`{name}` is as good as any mixture of {len(found)} methods: {gain:.4f} ± {error:.4f} nats below"
            " the unchanged logits on unseen folds"
        )
    else:
        why = (
            f"a mixture of {shown} is {abs(gain):.4f} ± {error:.4f} nats {'below' if gain >= 0 else 'above'}"
            f" the unchanged logits on unseen folds; `{best}`, the best method alone, is {abs(behind):.4f} ±"
            f" {behind_error:.4f} {'above' if behind >= 0 else 'below'} it"
        )
    unseen = []
    for fold, inside in enumerate(folds.masks):
        own = dict(zip(stacked, weights.by_fold[fold].tolist(), strict=True))
        is_same = used.keys() == {plain} or used.keys() & set(others)
        shares = used if is_same else {name: share for name, share in own.items() if share > 0}
        parts = [Component(name, found[name].folds[fold].logit_map) for name in shares]
        unseen.append((inside, folds.stack(parts, np.array(list(shares.values())))))
    chosen = next(iter(used)) if len(used) == 1 else "stack"
    return _Decision(chosen, used, means, gain, error, why, tuple(unseen))


def _with_last(
    data: ValidationSet, decision: _Decision, plain: Floats, seed: int, progress: Progress
) -> _Decision:
    """Let a network divide each row of the answers by a temperature, where unseen folds say that is better.

    A mixture of calibrated probabilities is not calibrated, but less sharp than they are (Ranjan and Gneiting
    2010), and methods with parameters per class see no row as such. The network is fitted to what the methods
    of each fold make of rows that they have not seen, and taken where it is better by more than a standard
    error: the networks of its own cross-validation, whose folds are these, are asked about their unseen rows.
    """
    mixed = np.empty(data.scores.shape)
    for inside, one in decision.unseen:
        mixed[inside] = one.logit_map.over(data.scores[inside])
    answers, known = data.with_logits(mixed), dict[str, Fitted]()
    last = fit_checked(LAST, answers, seed=seed, progress=progress, known=known).on_arrays.logit_map
    found: Any = known[LAST]
    if not found.has_networks:
        return decision
    before, unseen = map_losses(IdentityMap(data.num_classes), mixed, data.labels), []
    losses = before.copy()
    for (inside, one), point in zip(decision.unseen, found.folds, strict=True):
        own, rows = found.logit_map.with_network(point), answers.rows(inside)
        losses[inside] = map_losses(own, rows.scores, rows.labels)
        unseen.append((inside, _followed(one, own)))
    gain, error = _mean_and_error(before - losses, data)
    if gain <= error:
        return decision
    why = f"{decision.why}; `{LAST}` after it lowers the NLL by another {gain:.4f} ± {error:.4f}"
    gain, error = _mean_and_error(plain - losses, data)
    return replace(decision, why=why, gain=gain, gain_error=error, unseen=tuple(unseen), last=last)


def _followed(first: ArrayCalibrator, last: LogitMap) -> ArrayCalibrator:
    """Give the calibrator of a stack with another map after it."""
    return replace(first, method=f"{first.method}+{last.name}", logit_map=Chain(first.logit_map, last))


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
    losses: Floats  # (N,), of the mixture by the weights of the fold's own, in nats


def stack_weights(losses: Floats, fold_of: NDArray[Any], counts: Floats, most: int = MOST) -> StackWeights:
    """Give the weights of a stack, of at most so many components.

    `losses`: (N, M), of M methods on samples that they have not seen, in nats. `fold_of`: (N,), from 0.
    `counts`: (N,), how much each sample counts.
    """
    likelihoods = np.exp(-losses)
    by_fold = np.array(
        [
            _weights_of_few(likelihoods, np.where(fold_of == fold, 0.0, counts), most)
            for fold in range(int(fold_of.max()) + 1)
        ]
    )
    unseen = -np.log((likelihoods * by_fold[fold_of]).sum(axis=1))
    return StackWeights(_weights_of_few(likelihoods, counts, most), by_fold, unseen)


def _weights_of_few(likelihoods: Floats, counts: Floats, most: int) -> Floats:
    """Leave out the method of the smallest weight while there are more than `most`, or it is below 5 %."""
    kept = np.arange(likelihoods.shape[1])
    while True:
        found = mixing_weights(likelihoods[:, kept], counts, PRIOR)
        least = found.argmin()
        if len(kept) <= most and found[least] >= LEAST_SHARE:
            break
        kept = np.delete(kept, least)
    weights = np.zeros(likelihoods.shape[1])
    weights[kept] = found
    return weights


def mixing_weights(likelihoods: Floats, counts: Floats, prior: float) -> Floats:
    """Maximise `sum_i n_i log (q_i w) + prior sum_m log w_m` over w on the simplex (M,).

    `likelihoods`: q (N, M), above 0. `counts`: n (N,). `prior`: above 0.

    The optimum is that over w > 0 with the term `-(sum n + M prior) sum w`, which Newton's method finds.
    """
    q, n = likelihoods[counts > 0.0], counts[counts > 0.0]
    total = n.sum() + q.shape[1] * prior

    def value(w: Floats) -> float:
        return float(n @ np.log(q @ w) + prior * np.log(w).sum() - total * w.sum())

    w = np.full(q.shape[1], 1.0 / q.shape[1])
    reached = value(w)
    for _ in range(STEPS):
        ratios = q / (q @ w)[:, None]
        slope = n @ ratios + prior / w - total
        step = np.linalg.solve(ratios.T @ (n[:, None] * ratios) + np.diag(prior / w**2), slope)
        gain, length = float(slope @ step), min(1.0, INSIDE / max((-step / w).max(), INSIDE))
        if gain < STILL * total:
            break
        while length > SHORTEST and value(w + length * step) < reached + 1e-4 * length * gain:
            length /= 2.0
        w = w + length * step
        reached = value(w)
    return np.asarray(w / w.sum())
