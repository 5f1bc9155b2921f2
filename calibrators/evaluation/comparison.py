"""Compares methods on one validation set and one test set, like the main table of the paper.

Each method is fitted to the whole validation set and evaluated on the whole test set. Standard errors are
those of the delete-a-group jackknife: each fit omits one fold of the validation set and is evaluated without
one fold of the test set, so they include the variance of both. Without a test set the methods are
cross-fitted.

Writes a comparison of methods as Markdown or CSV.
"""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from boxcal.calibrators.array_calibrator import TwoStages
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.errors import InvalidDataError, MissingDataError
from boxcal.calibrators.evaluation.bootstrap import Estimate
from boxcal.calibrators.evaluation.crossfit import (
    FOLDS,
    CalibratedAnswers,
    Progress,
    answers_on,
    cross_fit,
    fit_set,
)
from boxcal.calibrators.evaluation.evaluate import Evaluation, compare, judge
from boxcal.calibrators.evaluation.html_report import table
from boxcal.calibrators.evaluation.outcomes import Outcomes, outcomes
from boxcal.calibrators.evaluation.toplabel import BinnedError, SmoothError
from boxcal.calibrators.method import MIXED
from boxcal.calibrators.threads import one_library_thread

BASELINE = "uncalibrated"
NO_CALIBRATORS: Mapping[str, TwoStages] = {}
METRICS = ("error_rate", "smooth_ece", "ece_mass", "ece_width", "nll", "brier")
DRAWS = 400

PAPERS_METHODS = (
    BASELINE,
    "pb",
    "pb-lower",
    "pb-upper",
    "pb-mlp",
    "lb",
    "ts",
    "ts+pb",
    "pts",
    "pts+pb",
    "ets",
    "ets+pb",
    "dirichlet",
    "dirichlet+pb",
    "nc",
    "nc+pb",
    "ta",
    "ta+pb",
    "fc",
    "dpb",
)
"""The methods of the paper, in its order; methods whose requirements are missing are omitted."""

_SLACK = 5e-5  # smaller changes are invisible in two decimals of a percentage, or four of a loss


@dataclass(frozen=True)
class MetricScore:
    """One metric of one method: value, standard error, and paired difference to the base method."""

    value: float
    standard_error: float
    change: Estimate | None

    @property
    def improves(self) -> bool | None:
        """Whether it is lower than that of the base method; None if there is no visible change."""
        if self.change is None or not abs(self.change.value) > _SLACK:
            return None
        return self.change.value < 0

    @property
    def is_clear(self) -> bool:
        """Whether the 95 % interval of the difference to the base method does not contain 0."""
        return (
            self.improves is not None and self.change is not None and self.change.low * self.change.high > 0
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "value": _number(self.value),
            "standard_error": _number(self.standard_error),
            "change": None if self.change is None else self.change.to_dict(),
            "improves": self.improves,
            "clear": self.is_clear,
        }


@dataclass(frozen=True, eq=False)
class MethodScores:
    """One row of the table."""

    # The method, or the name of a calibrator, and what it is compared with; the base is empty for
    # `uncalibrated`
    method: str
    base: str
    scores: dict[str, MetricScore]
    changed_labels: int  # Test samples whose predicted label differs from that of the logits
    seconds: float  # Time of the fits, all folds together


@dataclass(frozen=True, eq=False)
class MethodComparison:
    """Methods x metrics."""

    fit_samples: int  # `test_samples` is 0 if the methods were cross-fitted
    test_samples: int
    classes: int
    folds: int
    seed: int
    rows: list[MethodScores]
    left_out: dict[str, str]  # Methods that could not be fitted, with the reason

    def best(self, metric: str) -> float:
        """Return the lowest value of a metric."""
        return min((row.scores[metric].value for row in self.rows), default=math.nan)

    def to_dict(self) -> dict[str, Any]:
        return {
            "fit_samples": self.fit_samples,
            "test_samples": self.test_samples,
            "classes": self.classes,
            "folds": self.folds,
            "seed": self.seed,
            "methods": [
                {
                    "method": row.method,
                    "base": row.base or None,
                    "metrics": {name: score.to_dict() for name, score in row.scores.items()},
                    "changed_labels": row.changed_labels,
                    "fit_seconds": row.seconds,
                }
                for row in self.rows
            ],
            "left_out": self.left_out,
        }

    def _repr_html_(self) -> str:
        """Return the table of `markdown` for a notebook."""
        rows = [
            [
                f"<code>{escape(row.method)}</code>",
                *(
                    f"{_bold(value_text(name, score), is_best(self, name, score))} {mark(score)}"
                    for name, score in row.scores.items()
                ),
                str(row.changed_labels),
                f"{row.seconds:.1f}",
            ]
            for row in self.rows
        ]
        head = ["method", *(TITLES[name] for name in METRICS), "changed labels", "fits, s"]
        left = "".join(
            f"<p><code>{escape(name)}</code>: {escape(why)}</p>" for name, why in self.left_out.items()
        )
        return f"<div>{table(head, rows)}<p>{escape(LEGEND)}</p>{left}</div>"


def base_of(method: str) -> str:
    """Return the base method: `ts` for `ts+pb` and for `mix+ts`, `uncalibrated` for `pb` and for `ts`."""
    if method == BASELINE:
        return ""
    if method.startswith(MIXED):
        return method.removeprefix(MIXED)
    return method.rpartition("+")[0] or BASELINE


@one_library_thread()
def compare_methods(
    methods: Sequence[str],
    validation: ValidationSet,
    test: ValidationSet | None = None,
    *,
    calibrators: Mapping[str, TwoStages] = NO_CALIBRATORS,
    reference: str = BASELINE,
    folds: int = FOLDS,
    seed: int = 0,
    progress: Progress | None = None,
) -> MethodComparison:
    """Fit and evaluate methods, and evaluate calibrators, on the same data.

    `progress`: called with the completed fraction and the current step.
    """
    _check_sets(validation, test, folds)
    tell = progress or (lambda fraction, stage: None)
    names = _with_bases(methods)
    names[1:1] = calibrators
    judged: dict[str, Evaluation] = {}
    rows: list[MethodScores] = []
    left_out: dict[str, str] = {}
    target = validation if test is None else test
    plain = target.facts.predicted
    for place, method in enumerate(names):

        def part(fraction: float, stage: str, place: int = place, method: str = method) -> None:
            tell((place + fraction) / len(names), f"{method}: {stage}")

        started = time.perf_counter()
        try:
            if method in calibrators:
                whole = _outcomes(answers_on(calibrators[method], target), target)
                groups = [whole.rows(kept) for kept in _all_but_one(target, folds, seed)]
            else:
                whole, groups = _answers(method, validation, test, folds=folds, seed=seed, progress=part)
        except (MissingDataError, InvalidDataError) as error:
            if method == BASELINE:  # not the method, the data are the reason
                raise
            left_out[method] = str(error)
            continue
        seconds = time.perf_counter() - started
        judged[method] = judge(whole, seed=seed, draws=DRAWS)
        base = base_of(method)
        if method in calibrators:
            base = BASELINE if method == reference else reference
        difference = compare(judged[method], judged[base]) if base in judged else {}
        spread = _jackknife(groups)
        scores = {
            name: MetricScore(judged[method].estimates[name].value, spread[name], difference.get(name))
            for name in METRICS
        }
        changed = int((whole.predicted != plain).sum())
        rows.append(MethodScores(method, base, scores, changed, seconds))
    tell(1.0, "done")
    return MethodComparison(
        len(validation),
        0 if test is None else len(test),
        validation.num_classes,
        folds,
        seed,
        rows,
        left_out,
    )


def _check_sets(validation: ValidationSet, test: ValidationSet | None, folds: int) -> None:
    if test is not None and test.num_classes != validation.num_classes:
        raise InvalidDataError(
            f"the validation set has {validation.num_classes} classes, the test set {test.num_classes}"
        )
    smallest = len(validation) if test is None else min(len(validation), len(test))
    if not 2 <= folds <= smallest:
        raise InvalidDataError(f"folds must be 2 to {smallest}, the smallest set's samples, not {folds}")


def _with_bases(methods: Sequence[str]) -> list[str]:
    names = [BASELINE]
    for method in methods:
        for name in (base_of(method), method):
            if name and name not in names:
                names.append(name)
    return names


def _answers(
    method: str,
    validation: ValidationSet,
    test: ValidationSet | None,
    *,
    folds: int,
    seed: int,
    progress: Progress,
) -> tuple[Outcomes, list[Outcomes]]:
    """Return the outcomes to evaluate, and those of each group of the jackknife."""
    if test is None:
        answers = cross_fit(method, validation, folds=folds, seed=seed, progress=progress)
        whole = _outcomes(answers, validation)
        return whole, [whole.rows(kept) for kept in _all_but_one(validation, folds, seed)]
    whole = _fitted(method, validation, test, seed, _share(progress, 0, folds))
    groups = []
    fits = _all_but_one(validation, folds, seed)
    tests = _all_but_one(test, folds, seed)
    for number, (kept, judged_on) in enumerate(zip(fits, tests, strict=True), 1):
        part = _fitted(method, validation.rows(kept), test, seed, _share(progress, number, folds))
        groups.append(part.rows(judged_on))
    return whole, groups


def _share(progress: Progress, number: int, folds: int) -> Progress:
    """Progress of fit `number` of folds + 1."""
    name = "all samples" if number == 0 else f"without fold {number} of {folds}"
    return lambda fraction, stage: progress((number + fraction) / (folds + 1), f"{stage}, {name}")


def _fitted(
    method: str, validation: ValidationSet, test: ValidationSet, seed: int, progress: Progress
) -> Outcomes:
    return _outcomes(answers_on(fit_set(method, validation, seed=seed, progress=progress), test), test)


def _outcomes(answers: CalibratedAnswers, data: ValidationSet) -> Outcomes:
    return outcomes(answers.rows, data.labels, answers.predicted, data.units, weights=data.weights)


def _all_but_one(data: ValidationSet, folds: int, seed: int) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Return the indices of all samples but those of one fold, for each fold.

    Samples that are not independent share a fold, unless there are fewer of such groups than folds.
    """
    units = np.arange(len(data))
    if data.units is not None and data.units.max() + 1 >= folds:
        units = data.units
    order = np.random.default_rng(seed).permutation(units.max() + 1)
    fold_of = np.empty_like(order)
    fold_of[order] = np.arange(len(order)) % folds
    return [np.flatnonzero(fold_of[units] != fold) for fold in range(folds)]


def _jackknife(groups: Sequence[Outcomes]) -> dict[str, float]:
    """Return the standard error of each metric from its values without each group (Shao and Tu 1995)."""
    values = np.array([[value(group) for value in _VALUES.values()] for group in groups])
    values = np.where(np.isfinite(values).all(axis=0), values, np.nan)
    share = (len(groups) - 1) / len(groups)
    spread = np.sqrt(share * ((values - values.mean(axis=0)) ** 2).sum(axis=0))
    return dict(zip(_VALUES, spread.tolist(), strict=True))


_VALUES: dict[str, Callable[[Outcomes], float]] = {
    "error_rate": lambda scored: 1 - scored.mean(scored.correct),
    "smooth_ece": lambda scored: SmoothError(scored).value,
    "ece_mass": lambda scored: BinnedError(scored, "mass").value,
    "ece_width": lambda scored: BinnedError(scored, "width").value,
    "nll": lambda scored: scored.mean(scored.nll),
    "brier": lambda scored: scored.mean(scored.brier),
}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


TITLES = {
    "error_rate": "Error rate %",
    "smooth_ece": "smECE %",
    "ece_mass": "emECE %",
    "ece_width": "ewECE %",
    "nll": "NLL",
    "brier": "Brier",
}
IMPROVED, DEGRADED, CLEAR = "▼", "▲", "*"
IN_BRACKETS = "the standard error is in brackets"
LEGEND = (
    f"Lower is better; {IN_BRACKETS}. {IMPROVED} lower and {DEGRADED} higher than the"
    f" base method; `{CLEAR}`: the paired 95 % interval does not contain 0; bold: the best of its column."
)
_IN_PERCENT = {"error_rate", "smooth_ece", "ece_mass", "ece_width"}


def _bold(text: str, best: bool) -> str:
    return f"<strong>{text}</strong>" if best else text


def mark(score: MetricScore) -> str:
    """Return the sign of improvement or degradation over the base method; empty without a change."""
    if score.improves is None:
        return ""
    return (IMPROVED if score.improves else DEGRADED) + (CLEAR if score.is_clear else "")


def value_text(metric: str, score: MetricScore) -> str:
    """Format a score with its standard error: percentages with two decimals, other metrics with four."""
    scale, decimals = (100, 2) if metric in _IN_PERCENT else (1, 4)
    if not math.isfinite(score.value):
        return "infinite"
    error = f"{scale * score.standard_error:.{decimals}f}" if math.isfinite(score.standard_error) else "-"
    return f"{scale * score.value:.{decimals}f} ({error})"


def is_best(comparison: MethodComparison, metric: str, score: MetricScore) -> bool:
    """Whether a score is the lowest of its column in the digits shown."""
    best = MetricScore(comparison.best(metric), score.standard_error, None)
    return value_text(metric, score) == value_text(metric, best)


def markdown(comparison: MethodComparison) -> str:
    """Return the table in Markdown, one row per method and one column per metric."""
    lines = [
        "| method | " + " | ".join(TITLES[name] for name in METRICS) + " | changed labels | fits, s |",
        "|---|" + "---:|" * (len(METRICS) + 2),
    ]
    for row in comparison.rows:
        cells = []
        for name in METRICS:
            text = value_text(name, row.scores[name])
            if is_best(comparison, name, row.scores[name]):
                text = f"**{text}**"
            cells.append(f"{text} {mark(row.scores[name])}".rstrip())
        cells += [str(row.changed_labels), f"{row.seconds:.1f}"]
        lines.append(f"| `{row.method}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def to_csv(comparison: MethodComparison) -> str:
    """Return the table as CSV, one row per method and metric, with unrounded numbers."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(
        ["method", "base", "metric", "value", "standard_error", "change", "change_low", "change_high"]
    )
    for row in comparison.rows:
        for name, score in row.scores.items():
            change = score.change
            differences = ["", "", ""] if change is None else [change.value, change.low, change.high]
            writer.writerow([row.method, row.base, name, score.value, score.standard_error, *differences])
    return stream.getvalue()
