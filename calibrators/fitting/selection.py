"""`auto`: the plainest method of about the lowest cross-validated NLL, or the unchanged logits.

The quickest candidates run on all folds of the first repetition, the others on one fold. All that are not far
behind run on the other folds, networks only where they lead, and those that are still close on a second
repetition; then bounds are added to the best two that are still close. The selection has seen every sample,
so the gain of the best is overstated, and is corrected.

The methods that `auto` compares on a validation set, in the order in which it compares them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from boxcal.calibrators.checks import (
    absent_classes,
    holds_zeros,
    may_miss_classes,
    rare_classes,
    shows_errors,
)
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.fitting.cross_validation import (
    REPETITIONS,
    TOLERANCE,
    Comparison,
    paired_errors,
    plainest_of_equals,
    selection_bias,
    standard_error,
    weighted_mean,
)
from boxcal.calibrators.fitting.fit_method import fit_checked
from boxcal.calibrators.fitting.result import FitResult, Progress
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.method import ADDITIONS, MIXED, WITH_MIXTURE, Method, catalogue, parse

REGULARISED = {"vector", "sms", "dirichlet", "matrix"}
"""Methods with parameters per class that a penalty keeps near a temperature."""
SAMPLES_PER_PARAMETER = 10
"""Required by other methods with parameters per class."""
SAFE_WITH_FEW = {"vector", "sms"}
"""Regularised methods whose penalty is chosen from strengths of which the first leaves hardly more than a
temperature: classes may be absent by chance."""
SAMPLES_PER_CLASS, ENOUGH = 10, 100
"""Required by regularised methods; so many samples in all are enough for those that are `SAFE_WITH_FEW`."""
MOST_PARAMETERS, MOST_OF_SMS = 5, 10
"""Per sample, of a regularised method: larger ones take minutes to fit. `sms` tries only three strengths."""


def candidates(data: ValidationSet) -> list[str]:
    """List what the data allow, by number of parameters, networks last, without combinations.

    Methods with parameters per class need enough samples for their parameters, and of every class: no class
    may be rare. For those that are `SAFE_WITH_FEW`, classes may be absent by chance. Where probabilities of 0
    were sent, some methods are listed with a mixture, too. Where no predicted label is wrong, nothing limits
    how sharp a method makes the probabilities: the unchanged logits are left.
    """
    if not shows_errors(data.facts, data.labels):
        return [IdentityMap.name]
    given = {"logits"}
    if data.features is not None and data.head is not None:
        given.add("features")
    if data.inputs is not None and data.backbone is not None:
        given.add("inputs")
    found = [
        name
        for name, one in catalogue().items()
        if "+" not in name
        and one.logit_map.reads in given
        and (not one.is_per_class or _has_enough(name, data))
    ]
    if holds_zeros(data.facts):
        found += [MIXED + name for name in WITH_MIXTURE if name in found]
    return by_size(found, data.num_classes)


def by_size(names: Sequence[str], num_classes: int) -> list[str]:
    """Sort methods by their number of parameters, networks last."""
    order = list(catalogue())

    def rank(name: str) -> tuple[bool, int, int]:
        one = parse(name)
        return one.is_network, one.num_parameters(num_classes), order.index(name)

    return sorted(names, key=rank)


def _has_enough(name: str, data: ValidationSet) -> bool:
    """Whether there are enough samples for a method with parameters per class to do no harm."""
    K, count = data.num_classes, data.effective
    parameters, labels = parse(name).num_parameters(K), data.labels
    if len(rare_classes(labels, K)):
        return False
    complete = not len(absent_classes(labels, K))
    if name not in REGULARISED:
        return complete and count >= SAMPLES_PER_PARAMETER * parameters
    most, needed = MOST_OF_SMS if name == "sms" else MOST_PARAMETERS, SAMPLES_PER_CLASS * K
    if name in SAFE_WITH_FEW:
        complete, needed = complete or may_miss_classes(len(data), K), min(needed, ENOUGH)
    return complete and count >= needed and parameters <= most * count


BUDGET_SECONDS = 120.0
"""How long candidates are compared, unless the caller says otherwise."""
FIRST = ("ts", "vector")
"""Quick methods that run on the whole first repetition before others start: a small budget suffices."""
BEATEN = 5.0
"""Standard errors behind another method, during the first repetition, from which a candidate is dropped."""
NOT_CLOSE = 2.0
"""Standard errors behind the best after the first repetition, from which there is no second repetition."""
EQUAL = 0.75
"""Standard errors above the lowest NLL up to which a method counts as equal, and the plainest is selected."""


def choose(
    data: ValidationSet,
    *,
    seed: int,
    progress: Progress | None,
    budget_seconds: float = BUDGET_SECONDS,
) -> FitResult:
    """Select a method for the data and fit it to all of them.

    Of the methods within `EQUAL` standard errors of the lowest cross-validated NLL, the one with the fewest
    parameters is selected, unless a method with fewer has a lower NLL. `uncalibrated` stays unless the
    selection is better after bias correction. After `budget_seconds` the best of what was compared is taken.
    """
    report = progress or (lambda fraction, stage: None)
    started = time.monotonic()
    done = 0.0

    def tell(stage: str) -> None:
        report(done, stage)

    def share_done(begin: float, length: float, place: int, total: int) -> None:
        nonlocal done
        done = begin + length * place / total

    comparison = Comparison(data, seed, started + budget_seconds, tell)
    names = candidates(data)
    comparison.run(IdentityMap.name, len(comparison.parts))
    for name in FIRST:
        if name in names:
            comparison.run(name, comparison.first)
    tried = []
    for place, name in enumerate(names):
        share_done(0.0, 0.2, place, len(names))
        if comparison.run(name, 1):
            tried.append(name)
    leader = IdentityMap.name
    promising = _promising(comparison, tried)
    for place, name in enumerate(promising):
        share_done(0.2, 0.3, place, len(promising))
        comparison.run(name, comparison.first, against=leader, errors=BEATEN)
        leader = comparison.lowest(comparison.finished([leader, name]))
    _repeat(comparison, names)
    pairs = [(f"{base}+{addition}", base) for base in _bases(comparison, names) for addition in ADDITIONS]
    joined = {name: base for name, base in pairs if name in catalogue()}
    for place, (name, base) in enumerate(joined.items()):
        share_done(0.6, 0.3, place, len(joined))
        if comparison.run(name, 1) and _leads(comparison, name, base):
            comparison.run(name, comparison.first, against=base, errors=BEATEN)
    names += joined
    _repeat(comparison, names)
    compared = by_size(comparison.finished(names), data.num_classes)
    chosen, choice = _decide(comparison, compared, names)
    choice |= {"budget_seconds": budget_seconds, "seconds": time.monotonic() - started}
    result = fit_checked(
        chosen, data, seed=seed, progress=lambda fraction, stage: report(0.9 + 0.1 * fraction, stage)
    )
    return replace(result, choice=choice)


def _promising(comparison: Comparison, names: Sequence[str]) -> list[str]:
    """Keep the methods that are not far behind the best on the first fold; a network must be the best."""
    plain = [name for name in names if not parse(name).is_network]
    best = min(plain, key=lambda name: comparison.difference(name, IdentityMap.name, 1)[0])
    kept = []
    for name in names:
        mean, error = comparison.difference(name, best, 1)
        if mean <= -error if parse(name).is_network else not comparison.is_behind(name, best, BEATEN, 1):
            kept.append(name)
    return kept


def _repeat(comparison: Comparison, names: Sequence[str]) -> None:
    """Run the methods that are close to the best on the second repetition."""
    finished = comparison.finished(names)
    best = comparison.lowest(finished)
    for name in finished:
        if not comparison.is_behind(name, best, NOT_CLOSE, comparison.first):
            comparison.run(name, len(comparison.parts))


def _bases(comparison: Comparison, names: Sequence[str]) -> list[str]:
    """Give the logit maps that bounds are added to: of the best of those that are, and the next if close."""
    listed = catalogue()
    finished = [name for name in comparison.finished(names) if _is_base(parse(name), listed)]
    if not finished:
        return []
    best = comparison.lowest(finished)
    bases = [parse(best).logit_map.name]
    others = [name for name in finished if parse(name).logit_map.name != bases[0]]
    if others:
        second = comparison.lowest(others)
        if not comparison.is_behind(second, best, NOT_CLOSE, comparison.first):
            bases.append(parse(second).logit_map.name)
    return bases


def _is_base(method: Method, listed: Mapping[str, Method]) -> bool:
    """Whether bounds can be added to the logit map of a method; those of plain logits are listed alone."""
    return method.logit_map is IdentityMap or f"{method.logit_map.name}+{ADDITIONS[0]}" in listed


def _leads(comparison: Comparison, name: str, base: str) -> bool:
    """Whether a combination is better than its base on the first fold, a network by a standard error."""
    mean, error = comparison.difference(name, base, 1)
    return mean < -(error if parse(name).is_network else TOLERANCE)


def _decide(comparison: Comparison, compared: list[str], names: list[str]) -> tuple[str, dict[str, Any]]:
    """Select among what was compared, sorted by size, and say why."""
    losses = np.stack([comparison.losses(name) for name in compared], axis=2)
    nll = losses[:, 0]
    weights = comparison.data.weights
    means = dict(zip(compared, weighted_mean(nll, weights).tolist(), strict=True))
    plain, lowest = compared.index(IdentityMap.name), min(means, key=means.__getitem__)
    equal = paired_errors(nll, EQUAL, weights)
    equal[plain] = TOLERANCE
    index = plainest_of_equals(weighted_mean(nll, weights), equal)
    best = compared[index]
    bias = selection_bias(losses, equal, comparison.data.facts.copies, weights)
    gain = nll[:, plain] - nll[:, index]
    corrected, error = float(weighted_mean(gain, weights)) - bias["nll"], standard_error(gain, weights)
    chosen = best if corrected > TOLERANCE else IdentityMap.name
    shown = f"`{lowest}` has the lowest cross-validated NLL of {len(compared)} methods, {means[lowest]:.4f}"
    if best != lowest:
        shown += f", and `{best}` is the plainest within {EQUAL:g} standard errors of it, {means[best]:.4f}"
    if not shows_errors(comparison.data.facts, comparison.data.labels):
        why = (
            "no predicted label is wrong, so nothing limits how sharp a method makes the probabilities:"
            " the logits stay unchanged"
        )
    elif best == IdentityMap.name:
        why = "no method has a lower cross-validated NLL than the unchanged logits"
    elif chosen == best:
        why = f"{shown}: {corrected:.4f} ± {error:.4f} below the unchanged logits, corrected for the choice"
    else:
        why = (
            f"{shown}, but nothing is left of its gain over the unchanged logits after correction for the"
            f" choice: {corrected:.4f} ± {error:.4f}"
        )
    choice = {
        "chosen": chosen,
        "why": why,
        "best": best,
        "candidates": [_candidate(comparison, name, means) for name in dict.fromkeys([*compared, *names])],
        "cross_validated_nll": means,
        "corrected_gain": corrected,
        "selection_bias": bias,
        "folds": comparison.first,
        "repetitions": REPETITIONS,
    }
    return chosen, choice


def _candidate(comparison: Comparison, name: str, means: dict[str, float]) -> dict[str, Any]:
    """Give the row of the table of candidates."""
    fits = comparison.computed(name)
    behind = "behind on the first fold" if fits == 1 else f"behind after {fits} folds"
    return {
        "method": name,
        "parameters": parse(name).num_parameters(comparison.data.num_classes),
        "nll": means.get(name),
        "status": "compared" if name in means else "no time left" if name in comparison.late else behind,
        "seconds": comparison.seconds.get(name, 0.0),
    }
