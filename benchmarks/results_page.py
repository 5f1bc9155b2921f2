"""Writes docs/results.md: tables of recorded results, and their comparison with the findings of the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from boxcal.calibrators.evaluation.bootstrap import Estimate
from boxcal.calibrators.evaluation.comparison import Comparison, MethodScores, Score
from boxcal.calibrators.evaluation.tables import LEGEND, markdown

ERRORS = ("smooth_ece", "ece_mass", "ece_width")
OVERCONFIDENT = 0.03
"""A network is overconfident if its mean confidence exceeds its accuracy by this much."""
CALIBRATED = 0.03
"""A data set is already calibrated if its ewECE without calibration is below this."""

HEAD = """# Results on real data

This page compares methods that require only logits: those of the main table of the paper, and other common
methods. On data sets with 200 and 1,000 classes it includes the methods whose fit takes at most a minute.
Each method is fitted to the whole validation set and evaluated on the whole test set. The standard errors
are those of a delete-a-group jackknife over {folds} folds of both sets, so they include the variance of the
fit and of the test. With so few folds they are approximate. The stars are based on a paired bootstrap of
the test set.

`python -m benchmarks.results FOLDER` generates this page; the data sets are not part of the project. The
networks, splits and sizes differ from those of the paper, so this page compares its findings, not its
numbers. The times were measured on a machine with other load.

{legend}
"""


@dataclass(frozen=True)
class Results:
    """The results on one data set.

    Attributes
    ----------
    title : str
    beyond : float
        Mean confidence minus accuracy of the network without calibration.
    error_by_order : float
        Error rate of `pb-upper` if ties were broken by the order of the classes.
    auto : dict or None
        The method that `auto` selected, and its results on the test set; None if it was not run.
    comparison : Comparison
    """

    title: str
    beyond: float
    error_by_order: float
    auto: dict[str, Any] | None
    comparison: Comparison

    def row(self, method: str) -> MethodScores | None:
        """Return the scores of a method, or None if it was not run."""
        return next((row for row in self.comparison.rows if row.method == method), None)

    @property
    def is_overconfident(self) -> bool:
        """Whether the network is overconfident without calibration."""
        return self.beyond >= OVERCONFIDENT

    @property
    def is_calibrated(self) -> bool:
        """Whether the network is calibrated without a calibrator."""
        return self.comparison.rows[0].scores["ece_width"].value < CALIBRATED


def page(documents: list[dict[str, Any]]) -> str:
    """Return the page for the recorded results of each data set."""
    found = [
        Results(
            one["title"],
            one["confidence_beyond_accuracy"],
            one["pb_upper_error_by_order"],
            one["auto"],
            comparison_of(one),
        )
        for one in documents
    ]
    parts = [HEAD.format(folds=documents[0]["folds"], legend=LEGEND)]
    for one in found:
        parts.append(f"## {one.title}\n\n{_sizes(one)}\n\n{markdown(one.comparison)}")
    parts.append(_choices(found))
    parts.append("## The paper's findings, held against these tables\n")
    for question in (_pb_alone, _pb_added, _one_sided, _no_harm, _best):
        parts.append(question(found))
    return "\n".join(parts).rstrip() + "\n"


def comparison_of(document: dict[str, Any]) -> Comparison:
    """Build a comparison from the result of `Comparison.to_dict`."""
    rows = [
        MethodScores(
            row["method"],
            row["base"] or "",
            {name: _score(score) for name, score in row["metrics"].items()},
            row["changed_labels"],
            row["fit_seconds"],
        )
        for row in document["methods"]
    ]
    sizes = {name: document[name] for name in ("fit_samples", "test_samples", "classes", "folds", "seed")}
    return Comparison(rows=rows, left_out=document["left_out"], **sizes)


def _score(document: dict[str, Any]) -> Score:
    change = document["change"]
    estimate = (
        None if change is None else Estimate(*(_number(change[end]) for end in ("value", "low", "high")))
    )
    return Score(_number(document["value"]), _number(document["standard_error"]), estimate)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _sizes(one: Results) -> str:
    comparison = one.comparison
    left_out = ", ".join(f"`{method}`" for method in comparison.left_out)
    return (
        f"{comparison.classes:,} classes, fitted to {comparison.fit_samples:,} samples, evaluated on"
        f" {comparison.test_samples:,}. Mean confidence minus accuracy without calibration:"
        f" {100 * one.beyond:+.1f} %."
        + (f" Not included, because they require more than logits: {left_out}." if left_out else "")
    )


def _choices(found: list[Results]) -> str:
    """Return the table that compares `auto` with the best method and with no calibration."""
    lines = [
        "## `auto`, compared with the best single method and with no calibration",
        "",
        "`auto` uses the validation set only. The best single method has the lowest NLL on the test set. The"
        " table shows differences of test NLL, paired by sample, with 95 % intervals (studentised bootstrap);"
        " above 0 `auto` is worse. The first interval is for one difference. The second, simultaneous"
        " interval is for the differences to all methods of the table (maximal statistic), because the best"
        " method was selected on the same test set. `auto` is significantly worse if the second interval is"
        " above 0.",
        "",
        "| data set | selected by `auto` | test NLL | best single | `auto` minus best | simultaneous interval"
        " | `auto` minus `uncalibrated` | s |",
        "|---|---|---:|---|---:|---:|---:|---:|",
    ]
    chosen = [(one.title, one.auto) for one in found if one.auto is not None]
    for title, auto in chosen:
        lines.append(
            f"| {title} | `{auto['method']}` | {auto['test_nll']:.4f} | `{auto['best']}`"
            f" | {_difference(auto['against_best'])} | {_interval(auto['against_best_of_all'])}"
            f" | {_difference(auto['against_uncalibrated'])}"
            f" | {auto['seconds']:.0f} |"
        )
    worse = [title for title, auto in chosen if auto["against_best_of_all"]["low"] > 0]
    harmed = [title for title, auto in chosen if auto["against_uncalibrated"]["value"] > 0]
    left_out = [one.title for one in found if one.auto is None]
    lines += [
        "",
        f"Significantly worse than the best single method: {', '.join(worse) or 'on no data set'}."
        f" Worse than `uncalibrated`: {', '.join(harmed) or 'on no data set'}."
        + (f" Not run on: {', '.join(left_out)}." if left_out else ""),
        "",
    ]
    return "\n".join(lines)


def _difference(estimate: dict[str, float]) -> str:
    if _is_nothing(estimate):
        return "0"
    return f"{estimate['value']:+.5f} ({_interval(estimate)})"


def _interval(estimate: dict[str, float]) -> str:
    if _is_nothing(estimate):
        return "0"
    return f"{estimate['low']:+.5f} to {estimate['high']:+.5f}"


def _is_nothing(estimate: dict[str, float]) -> bool:
    """Whether a method was compared with itself."""
    return estimate["low"] == estimate["high"] == 0.0


def _verdict(agrees: int, of: int) -> str:
    if agrees == of:
        return f"Agrees on all {of}."
    return f"**Disagrees**: holds in {agrees} of {of}."


def _pb_alone(found: list[Results]) -> str:
    lines, agrees, total = [], 0, 0
    for one in found:
        pb, plain = one.row("pb"), one.comparison.rows[0]
        if pb is None or not one.is_overconfident:
            continue
        total += 1
        falls = pb.scores["ece_width"].value <= 0.75 * plain.scores["ece_width"].value
        agrees += falls and pb.changed_labels == 0
        lines.append(
            f"- {one.title}: ewECE {100 * plain.scores['ece_width'].value:.2f} % to"
            f" {100 * pb.scores['ece_width'].value:.2f} %, {pb.changed_labels} labels changed."
        )
    head = (
        "### `pb` improves an overconfident network by a large margin and keeps its labels\n\n"
        f"Criterion: ewECE decreases by at least a quarter, and no label changes. {_verdict(agrees, total)}\n"
    )
    return "\n".join([head, *lines, ""])


def _pb_added(found: list[Results]) -> str:
    lines = []
    counts = {True: 0, False: 0, None: 0}
    for one in found:
        here = {True: 0, False: 0, None: 0}
        for row in one.comparison.rows:
            if row.method.endswith("+pb"):
                for metric in ERRORS:
                    here[row.scores[metric].improves] += 1
        for outcome, count in here.items():
            counts[outcome] += count
        lines.append(f"- {one.title}: {here[True]} better, {here[False]} worse, {here[None]} unchanged.")
    total = sum(counts.values())
    verdict = "Agrees." if counts[True] > total / 2 else "**Disagrees.**"
    head = (
        "### Adding `pb` to the existing methods improves most cells\n\n"
        f"Counted over smECE, emECE and ewECE of every `+pb`: {counts[True]} of {total} better,"
        f" {counts[False]} worse, {counts[None]} unchanged in the digits shown. {verdict}"
        " At the optimum of the joint fit, the bounds are often inactive, and the row is equal to that of its"
        " base method. The paper uses 500 epochs of Adam, on other networks.\n"
    )
    return "\n".join([head, *lines, ""])


def _one_sided(found: list[Results]) -> str:
    lines, less, costs, costs_by_order, total = [], 0, 0, 0, 0
    for one in found:
        box, lower, upper = (one.row(name) for name in ("pb", "pb-lower", "pb-upper"))
        if not one.is_overconfident or box is None or lower is None or upper is None:
            continue
        total += 1
        less += lower.scores["ece_width"].value >= box.scores["ece_width"].value
        costs += upper.scores["error_rate"].improves is False
        costs_by_order += one.error_by_order > upper.scores["error_rate"].value
        values = ", ".join(
            f"`{row.method}` {100 * row.scores['ece_width'].value:.2f} %" for row in (box, lower, upper)
        )
        lines.append(f"- {one.title}: ewECE {values}; `pb-upper` changed {upper.changed_labels} labels.")
    head = (
        "### Lower bounds alone gain less than both bounds, upper bounds alone cost accuracy\n\n"
        f"Lower bounds gain less: {_verdict(less, total)}"
        f" Upper bounds cost accuracy: {_verdict(costs, total)}"
        " If an upper bound makes classes equal, the label is the class with the larger logit, so uniform"
        " bounds never change a label. Ties broken by the order of classes would cost accuracy on"
        f" {costs_by_order} of {total}.\n"
    )
    return "\n".join([head, *lines, ""])


def _no_harm(found: list[Results]) -> str:
    lines = []
    for one in found:
        if not one.is_calibrated:
            continue
        harmed = []
        for row in one.comparison.rows:
            worse = [name for name, score in row.scores.items() if score.improves is False and score.is_clear]
            if worse:
                harmed.append(f"`{row.method}` in {', '.join(worse)}")
        lines.append(f"- {one.title}: {'; '.join(harmed) or 'no method'}.")
    head = (
        "### No method does harm on a data set that is already calibrated\n\n"
        "Methods that are clearly worse than their base method:\n"
    )
    return "\n".join([head, *lines, ""])


def _best(found: list[Results]) -> str:
    lines = []
    for one in found:
        rows = sorted(one.comparison.rows, key=lambda row: row.scores["smooth_ece"].value)
        leaders = ", ".join(
            f"`{row.method}` {100 * row.scores['smooth_ece'].value:.2f} %" for row in rows[:3]
        )
        lines.append(f"- {one.title}: {leaders}.")
    head = (
        "### The best calibrated method\n\n"
        "In the paper, `pts+pb` is best on the largest data sets and `dpb` on CIFAR-100 and 20News."
        " Lowest smECE here:\n"
    )
    return "\n".join([head, *lines, ""])
