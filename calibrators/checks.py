"""Checks of validation data before a fit: warnings about what is probably wrong with them.

Logits (N, K) and labels (N,) that `check_validation_set` has passed go in; `DataWarning`s come out. A serious
one means that the data probably do not represent what the service will receive: a gate must not activate a
fit to them.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.errors import ValidationDataWarning
from boxcal.calibrators.label_checks import (
    FLATTEST,
    SHARPEST,
    class_offsets,
    intercept,
    is_associated,
    looks_random,
    mean_confidence,
    shared_residuals,
    unrelated_share,
)
from boxcal.calibrators.method import parse
from boxcal.calibrators.row_statistics import RowStatistics, Sketch, overlap
from boxcal.calibrators.scores import SIGMOIDS, WHOLE, ScoreLook

Severity = Literal["warning", "serious"]
Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

SUM_TOLERANCE = 1e-3
SPREAD = 0.1
"""How far apart the scores of a row lie at least, of their mean, where rows are scaled."""
ZERO = math.log(1e-30)
"""A log probability below this is that of a probability 0, which uploads keep as the smallest number."""
CLIPPED_SHARE = 0.01
"""Share of all values that are equal to the smallest one, from which they look clipped."""
COPIES = 0.01
"""Share of rows that repeat another from which there is a warning."""
SHARED, CERTAIN = 0.4, 6.0
"""Share of its residual that a row has in common with the nearest one, and how many standard errors that is,
above which rows are near copies: of 2,052 sets of independent samples none has both, one .69 with 5.5."""
FEWEST_EFFECTIVE = 20
"""Effective samples of weighted ones below which the gate would open too often without a cause."""
CHANCE_ABSENCE = 0.01
"""Probability that some class is absent by chance; below it an absence is serious."""
ENOUGH_OF_CLASS = 25
"""Samples of a class from which its own parameters are better than none, found with thinned classes."""
EXCESS_ERROR = 0.25
"""How far the error rate may exceed what the probabilities themselves expect, where it is above 1/2."""
UNRELATED, MANY_UNRELATED = 0.01, 0.03
"""Share of labels that seem independent of the logits: reported above the first, serious above the second."""
SIGNIFICANT = 4.0
"""Standard errors above which a share of unrelated labels is significant."""
UNRELATED_LABELS = "unrelated_labels"
EQUAL = 0.02
"""Difference of the counts of two classes, of their mean, up to which they look chosen."""
SHIFTED = math.log(3.0)
"""How far the log odds exceed those that the logits expect, beyond three standard errors, where samples were
drawn by class."""
CHANGED = 0.1
"""Share of predicted labels that a calibrator may change without lowering the error rate."""
KNOWN = 0.5
"""Share of rows that the active calibrator was fitted to, from which there is a warning."""


@dataclass(frozen=True)
class DataWarning:
    """One finding about a validation set."""

    code: str  # A stable name, such as `duplicates`
    severity: Severity  # `serious` where an activation by the gate is refused, else `warning`
    message: str  # One or two sentences for people
    rows: int  # How many rows are concerned; N where the whole set is

    def to_dict(self) -> dict[str, Any]:
        """Return the warning as a JSON-ready document."""
        return asdict(self)


def check_data(data: ValidationSet) -> list[DataWarning]:
    """Look for what is probably wrong with validation data.

    Weights may give classes drawn in equal numbers the frequencies that they have: `class_mix` is not asked,
    nor where the sender says how samples were drawn. Classes that are rare `as_traffic` are no fault.
    """
    rows, logits, labels, num_classes = data.facts, data.logits, data.labels, data.num_classes
    found = [
        _classes(data),
        None if data.class_mix == "as_traffic" else _rare_classes(data),
        _no_errors(rows, labels),
        _other_kind(rows, logits) or _normalised(rows, num_classes),
        _constant(rows),
        _duplicates(data),
        _zeros(rows),
        _clipped(rows, num_classes),
        _few_effective(data),
        _near_copies(data),
    ]
    warnings = [warning for warning in found if warning is not None]
    codes = {warning.code for warning in warnings}
    if "one_class" not in codes and (
        wrong := _error_rate(rows, logits, labels) or _unrelated(logits, labels)
    ):
        warnings.append(wrong)
    elif data.class_mix is None and data.weights is None and (mix := _class_mix(data)):
        warnings.append(mix)
    if data.class_mix == "resampled":
        warnings.append(_resampled(data))
    return warnings


def check_fit(method: str, data: ValidationSet) -> list[DataWarning]:
    """Look for what is wrong with validation data, and with fitting a method to them.

    `auto` has no remark of its own: its cross-validation compares what it takes with plainer methods. Where a
    class is rare, a method with parameters per class is not for the gate to judge: its NLL on the few samples
    of the class says little.
    """
    if method == "auto":
        return check_data(data)
    one = parse(method)
    parameters = one.num_parameters(data.num_classes)
    count, labels = len(data), data.labels
    warnings = check_data(data)
    if one.is_per_class:
        warnings = [
            replace(found, severity="serious") if found.code == "rare_classes" else found
            for found in warnings
        ]
    absent = absent_classes(labels, data.num_classes)
    if len(absent) and one.is_per_class:
        message = (
            f"`{method}` fits parameters per class, but {_named(data, absent)} no sample:"
            " it makes such classes nearly impossible"
        )
        warnings.append(DataWarning("no_data_for_class", "serious", message, count))
    if parameters > data.effective:
        shown = (
            f"{count:,}"
            if data.weights is None
            else f"{count:,} weighted (effectively {data.effective:,.0f})"
        )
        message = (
            f"{shown} samples are few for `{method}`, which has {parameters:,} parameters;"
            " a method with fewer, such as `ts`, may do better on new data"
        )
        warnings.append(DataWarning("few_samples", "warning", message, count))
    return warnings


def warn_of_serious(findings: Iterable[DataWarning]) -> None:
    """Warn of each serious finding, at the line outside of this package that asked for the fit."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith("boxcal."):
        frame, level = frame.f_back, level + 1
    for finding in findings:
        if finding.severity == "serious":
            warnings.warn(f"{finding.code}: {finding.message}", ValidationDataWarning, stacklevel=level)


def absent_classes(labels: Labels, num_classes: int) -> NDArray[np.int64]:
    """List the classes that no label names."""
    return np.flatnonzero(np.bincount(labels, minlength=num_classes) == 0)


def rare_classes(labels: Labels, num_classes: int) -> NDArray[np.int64]:
    """List the classes with fewer labels than their own parameters need, and than chance explains.

    Chance explains a count n of a class if, were all classes equally frequent, some class would have n
    labels or fewer with a probability above `CHANCE_ABSENCE`: K P(Poisson(N / K) <= n), a bound on it.
    """
    from scipy.special import pdtr  # noqa: PLC0415 - only fits need scipy

    counts = np.bincount(labels, minlength=num_classes)
    by_chance = num_classes * pdtr(counts, len(labels) / num_classes) > CHANCE_ABSENCE
    return np.flatnonzero((counts < ENOUGH_OF_CLASS) & ~by_chance)


def may_miss_classes(count: int, num_classes: int) -> bool:
    """Whether so few samples may miss one of the classes by chance."""
    return num_classes * math.exp(-count / num_classes) > CHANCE_ABSENCE


def check_changed(changed: int, count: int, before: float, after: float) -> list[DataWarning]:
    """Warn where a calibrator changes many predicted labels and the error rate does not fall."""
    if changed <= CHANGED * count or after > before:
        return []
    message = (
        f"the calibrator changes {changed:,} of {count:,} predicted labels, and the error rate does"
        f" not fall: {1 - before:.1%} before, {1 - after:.1%} after"
    )
    return [DataWarning("labels_changed", "warning", message, changed)]


def check_known(
    rows: Sketch, known: Sketch, who: str, effect: str, severity: Severity = "serious"
) -> list[DataWarning]:
    """Warn where most rows are among those of a fit, and more than would be by chance.

    A forest of 50 trees gives two classes 51 different rows at most, so that those of other data are among
    them too. A new row is an old one with the probability 1 - (rows seen once) / N (Good 1953), which is less
    than the share of `repeated` rows plus 1/2: as each that was seen more than once was seen twice at least.
    `who`: what was fitted, with its verb, as in "the calibrator was"; `effect`: what it does to the figures.
    """
    share = overlap(rows, known)
    if share - known.repeated < KNOWN:
        return []
    message = f"about {share:.0%} of the rows are among those that {who} fitted to, so {effect}"
    return [DataWarning("known_rows", severity, message, round(share * rows.count))]


def _classes(data: ValidationSet) -> DataWarning | None:
    """Find absent classes, unless there are so few samples that some are absent by chance."""
    count, labels, num_classes = len(data), data.labels, data.num_classes
    absent = absent_classes(labels, num_classes)
    if len(absent) == num_classes - 1:
        only = data.name_of(labels[0])
        message = f"every label is {only}: the set shows nothing about the {len(absent)} other classes"
        return DataWarning("one_class", "serious", message, count)
    if not len(absent) or may_miss_classes(count, num_classes):
        return None
    message = f"{_named(data, absent)} no sample among {count:,}: the set shows nothing about {_them(absent)}"
    severity: Severity = "warning" if data.class_mix == "as_traffic" else "serious"
    return DataWarning("absent_classes", severity, message, count)


def _rare_classes(data: ValidationSet) -> DataWarning | None:
    """Find classes with a few samples, unless the set is so small that this is expected."""
    counts = np.bincount(data.labels, minlength=data.num_classes)
    rare = rare_classes(data.labels, data.num_classes)
    rare = rare[counts[rare] > 0]
    if not len(rare):
        return None
    taken = (
        "`auto` takes `beta` and `quadratic`, and from ten samples on `sms`"
        if data.num_classes == 2
        else "from ten samples on `auto` takes `vector`, `sms` and, for at most 20 classes, `dirichlet` or"
        " `polynomial`"
    )
    message = (
        f"{_named(data, rare)} fewer than {ENOUGH_OF_CLASS} samples, far fewer than the others: methods with"
        f" parameters per class fit {_them(rare)} badly; {taken}. If"
        f" {_them(rare, 'it is', 'they are')} as rare among requests, fit with class_mix=as_traffic"
    )
    return DataWarning("rare_classes", "warning", message, int(counts[rare].sum()))


def _no_errors(rows: RowStatistics, labels: Labels) -> DataWarning | None:
    """Find sets without a wrong prediction: their NLL is lowest with infinitely sharp probabilities."""
    if (rows.predicted != labels).any():
        return None
    message = (
        f"all {len(labels):,} predicted labels are right: the set does not show how often the model is wrong,"
        " and most methods fit probabilities of almost 0 and 1 to it"
    )
    return DataWarning("no_errors", "serious", message, len(labels))


def _other_kind(rows: RowStatistics, logits: NDArray[Any]) -> DataWarning | None:
    """Find probabilities, percentages and sigmoids sent as logits."""
    if rows.smallest.min() < 0:
        return None
    kind = ScoreLook.of(np.array_split(logits, -(-logits.size // 2_000_000))).kind
    if kind is None:
        return None
    if kind == SIGMOIDS:
        message = (
            "all logits lie between 0 and 1 and the rows have different sums: send the logits of sigmoids of"
            " one-vs-rest models, log(p / (1 - p)), and cosines of a contrastive model times its scale, which"
            " is 100 for CLIP"
        )
        return DataWarning("sigmoids", "serious", message, len(logits))
    message = (
        f"all logits are at least 0 and every row sums to {WHOLE[kind]:g}: set scores={kind}, or fit their"
        " logarithms"
    )
    return DataWarning("rows_sum_to_constant", "serious", message, len(logits))


def _normalised(rows: RowStatistics, num_classes: int) -> DataWarning | None:
    """Find rows scaled to a fixed sum, and rows scaled to a fixed norm."""
    sums, norms = rows.sums, rows.norms
    count, total = len(sums), float(np.median(sums))
    if np.median(rows.largest - rows.smallest) < SPREAD * abs(total) / num_classes:
        return None  # A large number was added to logits: it makes all of them, and so all sums, almost equal
    if rows.smallest.min() >= 0 and total > 0 and (np.abs(sums - total) <= SUM_TOLERANCE * total).all():
        message = (
            f"all logits are at least 0 and every row sums to {total:.4g}:"
            " probabilities must be sent as `probabilities`"
        )
        return DataWarning("rows_sum_to_constant", "serious", message, count)
    norm = float(np.median(norms))
    # Logarithms of probabilities 0 and 1 have one norm too, but no number above 0.
    may_be_scaled = num_classes > 2 and norm > 0 and rows.largest.max() > 0
    if may_be_scaled and (np.abs(norms - norm) <= SUM_TOLERANCE * norm).all():
        message = f"every row of logits has the norm {norm:.4g}: send the logits before normalisation"
        return DataWarning("rows_normalised", "serious", message, count)
    return None


def _constant(rows: RowStatistics) -> DataWarning | None:
    is_constant = rows.largest == rows.smallest
    constant = int(is_constant.sum())
    if not constant:
        return None
    message = f"{constant:,} rows hold one value for all classes: the model may have failed on them"
    # Discrete scores tie by chance, as a forest's of two classes do: no more rows than have another value.
    often = np.unique(rows.hashes[~is_constant], return_counts=True)[1].max(initial=0)
    serious = constant > max(COPIES * len(rows.sums), 2 * often)
    return DataWarning("constant_rows", "serious" if serious else "warning", message, constant)


def _duplicates(data: ValidationSet) -> DataWarning | None:
    """Find copies of rows, but for those within one group, which the sender has declared."""
    copied, count = data.facts.copies, len(data)
    rows = copied if data.groups is None else np.unique(np.column_stack([copied, data.groups]), axis=0)[:, 0]
    copies = len(rows) - len(np.unique(rows))
    if copies < max(1.0, COPIES * count):
        return None
    message = (
        f"{copies:,} of {count:,} rows repeat another row. Copies count as one sample in folds and intervals:"
        " send each sample once"
    )
    return DataWarning("duplicates", "warning", message, copies)


def _zeros(rows: RowStatistics) -> DataWarning | None:
    zeros = int((rows.own - rows.largest < ZERO).sum())
    if not zeros:
        return None
    message = (
        f"{zeros:,} rows give the true class probability 0. A method with a mixture, such as `mix+ts`, or"
        " with a lower bound, such as `ts+pb`, learns what such a zero is worth"
    )
    return DataWarning("zero_probability", "warning", message, zeros)


def _clipped(rows: RowStatistics, num_classes: int) -> DataWarning | None:
    """Find logits or log probabilities that were cut off at one value from below."""
    least = rows.smallest.min()
    holds = rows.smallest == least
    values = int(rows.at_smallest[holds].sum())  # one is always the smallest
    if values < max(2, CLIPPED_SHARE * len(holds) * num_classes) or rows.largest.max() == least:
        return None
    clipped = int(holds.sum())
    message = (
        f"{clipped:,} rows hold the smallest value, {least:.4g}, exactly: zeros or clipped values hide how"
        " small these probabilities are"
    )
    return DataWarning("clipped_values", "warning", message, clipped)


def _near_copies(data: ValidationSet) -> DataWarning | None:
    """Find rows that are alike, with one label, where nobody says that they belong together."""
    shared, significance = shared_residuals(data.logits, data.labels, data.units)
    if shared <= SHARED or significance <= CERTAIN:
        return None
    message = (
        f"rows are near copies of others: {shared:.0%} of what is not explained of a row is the same in the"
        " nearest one, as of frames of a video, slices of a patient, or variants of a photograph. Folds then"
        " show each fit what it is judged on: give such samples one `group`, or send one of each"
    )
    return DataWarning("near_copies", "serious", message, len(data))


def _few_effective(data: ValidationSet) -> DataWarning | None:
    """Find weights of which few decide.

    Counted is sum w sum w^2 / sum w^3, the number of samples where weights are equal: where some are far
    above the others it is less than the effective number, (sum w)^2 / sum w^2, which says how wide an
    interval is, and not that its level holds.
    """
    weights = data.weights
    if weights is None:
        return None
    counted = float(weights.sum() * (weights**2).sum() / (weights**3).sum())
    if counted >= FEWEST_EFFECTIVE:
        return None
    little = f": fewer than {FEWEST_EFFECTIVE} show little"
    if data.effective >= FEWEST_EFFECTIVE:
        little = f", and the largest weight is {weights.max() / weights.sum():.0%} of all"
    message = (
        f"{len(data):,} weighted samples count like {data.effective:.1f} of one weight{little}; the largest"
        " weights decide"
    )
    return DataWarning("few_effective", "serious", message, len(data))


def _error_rate(rows: RowStatistics, logits: NDArray[Any], labels: Labels) -> DataWarning | None:
    """Find labels that do not belong to the logits: no association, or errors like random classes."""
    error = float((rows.predicted != labels).mean())
    confidence = mean_confidence(logits)
    excess = error > 0.5 and error + confidence - 1 > EXCESS_ERROR
    if is_associated(logits, labels) and not (excess and looks_random(logits, labels)):
        return None
    message = (
        f"error rate {error:.1%}, where the logits themselves expect {1 - confidence:.1%}:"
        " labels may not belong to these logits"
    )
    return DataWarning("error_rate", "serious", message, round(error * len(labels)))


def _unrelated(logits: NDArray[Any], labels: Labels) -> DataWarning | None:
    """Find a share of labels that do not belong to the logits."""
    unrelated, excess = unrelated_share(logits, labels)
    if unrelated <= UNRELATED or excess <= SIGNIFICANT:
        return None
    rows = round(unrelated * len(labels))
    message = (
        f"about {unrelated:.1%} of the labels ({rows:,} rows) look independent of the logits: more true"
        " classes have a very small probability than at any temperature. If the labels are wrong, the"
        " fitted probabilities are too uniform"
    )
    severity: Severity = "serious" if unrelated > MANY_UNRELATED else "warning"
    return DataWarning(UNRELATED_LABELS, severity, message, rows)


def _class_mix(data: ValidationSet) -> DataWarning | None:
    """Find samples that were drawn in equal numbers of each class, where the logits expect other numbers.

    Networks of more than two classes expect other numbers than they were trained on: this is a question then.
    """
    logits, labels = data.logits, data.labels
    counts = np.bincount(labels, minlength=data.num_classes)
    if len(counts) > 2 and len(labels) >= ENOUGH_OF_CLASS * len(counts) and counts.min() == counts.max():
        return _equal_numbers(data)
    if len(counts) != 2 or counts.max() - counts.min() > EQUAL * counts.mean():
        return None
    found = intercept(logits, labels)
    if found is None or not FLATTEST <= found.inverse <= SHARPEST:
        return None
    if abs(found.value) - 3.0 * found.error <= SHIFTED:
        return None
    rare, share = data.name_of(int(found.value > 0.0)), 1.0 / (1.0 + math.exp(abs(found.value)))
    message = (
        f"both classes have about {counts.mean():,.0f} samples, as after a draw by class, but the logits"
        f" expect {share:.1%} of class {rare}. If requests have that"
        " share, a fit to these samples is wrong for them: fit with class_mix=resampled, or with weights. If"
        " requests have both in these numbers, fit with class_mix=as_traffic"
    )
    return DataWarning("class_mix", "serious", message, len(labels))


def _equal_numbers(data: ValidationSet) -> DataWarning | None:
    """Ask whether more than two classes with one number of samples each are as frequent among requests."""
    offsets = class_offsets(data.logits, data.labels)
    if offsets is None or np.ptp(offsets) <= SHIFTED:
        return None
    shares = np.exp(offsets.min() - offsets)
    shares /= shares.sum()
    least, most = (
        f"{shares[one]:.1%} of class {data.name_of(one)}"
        for one in (int(shares.argmin()), int(shares.argmax()))
    )
    message = (
        f"all {data.num_classes} classes have {len(data) // data.num_classes:,} samples, as after a draw by"
        f" class, but the logits expect {least} and {most}. If requests do too, fit with class_mix=resampled;"
        " if they have as many of each class, with class_mix=as_traffic"
    )
    return DataWarning("class_mix", "warning", message, len(data))


def _resampled(data: ValidationSet) -> DataWarning:
    """Say which class frequencies the weights of samples drawn by class give."""
    given = np.bincount(data.labels) / len(data)
    weighted = np.bincount(data.labels, data.weights) / len(data)
    present = np.flatnonzero(given)
    changed = present[np.argsort(-np.abs(np.log(weighted[present] / given[present])), kind="stable")][:5]
    listed = ", ".join(
        f"class {data.name_of(int(one))} {weighted[one]:.2%} ({given[one]:.2%} of the samples)"
        for one in np.sort(changed)
    )
    message = f"weights make classes as frequent as the logits expect: {listed}"
    return DataWarning("class_mix", "warning", message, len(data))


def _named(data: ValidationSet, classes: NDArray[np.int64]) -> str:
    """Name classes as the subject of a sentence, with its verb."""
    first = ", ".join(data.name_of(one) for one in classes[:5])
    if len(classes) == 1:
        return f"class {first} has"
    more = f" and {len(classes) - 5} more" if len(classes) > 5 else ""
    return f"classes {first}{more} have"


def _them(classes: NDArray[np.int64], one: str = "it", more: str = "them") -> str:
    return one if len(classes) == 1 else more
