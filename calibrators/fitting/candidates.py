"""The methods that `auto` compares on a validation set, in the order in which it compares them."""

from __future__ import annotations

from collections.abc import Sequence

from boxcal.calibrators.checks import (
    absent_classes,
    holds_zeros,
    may_miss_classes,
    rare_classes,
    shows_errors,
)
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.method import MIXED, WITH_MIXTURE, catalogue, parse

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
    if not shows_errors(data.facts, data.labels.numpy()):
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
    parameters, labels = parse(name).num_parameters(K), data.labels.numpy()
    if len(rare_classes(labels, K)):
        return False
    complete = not len(absent_classes(labels, K))
    if name not in REGULARISED:
        return complete and count >= SAMPLES_PER_PARAMETER * parameters
    most, needed = MOST_OF_SMS if name == "sms" else MOST_PARAMETERS, SAMPLES_PER_CLASS * K
    if name in SAFE_WITH_FEW:
        complete, needed = complete or may_miss_classes(len(data), K), min(needed, ENOUGH)
    return complete and count >= needed and parameters <= most * count
