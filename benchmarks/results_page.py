"""The page of results: tables from kept figures, and each of the paper's findings held against them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from calibrators.evaluation.bootstrap import Estimate
from calibrators.evaluation.comparison import Comparison, MethodScores, Score
from calibrators.evaluation.tables import LEGEND, markdown

ERRORS = ("smooth_ece", "ece_mass", "ece_width")
OVERCONFIDENT = 0.03
"""Uncalibrated ewECE from which a set counts as miscalibrated, overconfident or not."""

HEAD = """# Results on real data

The methods of the paper's main table that need no more than logits, on real validation and test sets; on
the larger sets only those that are fitted in seconds. Each is fitted to the whole validation set and
judged on the whole test set; the standard errors are those of a delete-a-group jackknife over {folds}
folds of both, so they count the chance in the fit and in the test. With so few folds they are rough
themselves. The stars rest on a paired bootstrap of the test set.

`python -m benchmarks.results FOLDER` makes this page; the data are not part of the project. The networks,
the splits and the sizes differ from the paper's, so its findings are compared here, not its figures. The
times are those of a busy machine.

{legend}
"""


def page(documents: list[dict[str, Any]]) -> str:
    """Write the page from the kept figures of each data set."""
    parts = [HEAD.format(folds=documents[0]["folds"], legend=LEGEND)]
    comparisons = [(document["title"], comparison_of(document)) for document in documents]
    for document, (title, comparison) in zip(documents, comparisons, strict=True):
        parts.append(f"## {title}\n\n{_sizes(comparison)} {_auto(document)}\n\n{markdown(comparison)}")
    parts.append("## The paper's findings, held against these tables\n")
    for question in (_pb_alone, _pb_added, _one_sided, _no_harm, _best):
        parts.append(question(comparisons))
    return "\n".join(parts).rstrip() + "\n"


def comparison_of(document: dict[str, Any]) -> Comparison:
    """Read back what `Comparison.to_dict` wrote."""
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


def _sizes(comparison: Comparison) -> str:
    left_out = (
        f" Left out, since they need more than logits: {', '.join(f'`{m}`' for m in comparison.left_out)}."
    )
    return (
        f"{comparison.classes:,} classes, fitted to {comparison.fit_samples:,} samples,"
        f" judged on {comparison.test_samples:,}.{left_out if comparison.left_out else ''}"
    )


def _auto(document: dict[str, Any]) -> str:
    auto = document["auto"]
    return "`auto` was not run here." if auto is None else f"`auto` chose `{auto['method']}`."


def _row(comparison: Comparison, method: str) -> MethodScores | None:
    return next((row for row in comparison.rows if row.method == method), None)


def _overconfident(comparisons: list[tuple[str, Comparison]]) -> Iterator[tuple[str, Comparison]]:
    for title, comparison in comparisons:
        if comparison.rows[0].scores["ece_width"].value >= OVERCONFIDENT:
            yield title, comparison


def _verdict(agrees: int, of: int) -> str:
    if agrees == of:
        return f"Agrees on all {of}."
    return f"**Disagrees**: holds in {agrees} of {of}."


def _pb_alone(comparisons: list[tuple[str, Comparison]]) -> str:
    lines, agrees, total = [], 0, 0
    for title, comparison in _overconfident(comparisons):
        pb, plain = _row(comparison, "pb"), comparison.rows[0]
        if pb is None:
            continue
        total += 1
        halved = pb.scores["ece_width"].value <= 0.75 * plain.scores["ece_width"].value
        agrees += halved and pb.changed_labels == 0
        lines.append(
            f"- {title}: ewECE {100 * plain.scores['ece_width'].value:.2f} % to"
            f" {100 * pb.scores['ece_width'].value:.2f} %, {pb.changed_labels} labels changed."
        )
    head = (
        "### `pb` improves an overconfident network by a large margin and keeps its labels\n\n"
        f"Read as: ewECE falls by a quarter or more, and no label changes. {_verdict(agrees, total)}\n"
    )
    return "\n".join([head, *lines, ""])


def _pb_added(comparisons: list[tuple[str, Comparison]]) -> str:
    lines = []
    counts = {True: 0, False: 0, None: 0}
    for title, comparison in comparisons:
        here = {True: 0, False: 0, None: 0}
        for row in comparison.rows:
            if row.method.endswith("+pb"):
                for metric in ERRORS:
                    here[row.scores[metric].improves] += 1
        for outcome, count in here.items():
            counts[outcome] += count
        lines.append(f"- {title}: {here[True]} better, {here[False]} worse, {here[None]} unchanged.")
    total = sum(counts.values())
    verdict = "Agrees." if counts[True] > total / 2 else "**Disagrees.**"
    head = (
        "### Adding `pb` to the existing methods improves most cells\n\n"
        f"Counted over smECE, emECE and ewECE of every `+pb`: {counts[True]} of {total} better,"
        f" {counts[False]} worse, {counts[None]} the same to the digits shown. {verdict}"
        " Where a temperature is fitted jointly to its optimum, the likelihood often prefers bounds that hold"
        " nothing back, and the row repeats its base;"
        " the paper's gains come with its own recipe of fitting (Adam, 500 epochs).\n"
    )
    return "\n".join([head, *lines, ""])


def _one_sided(comparisons: list[tuple[str, Comparison]]) -> str:
    lines, less, costs, total = [], 0, 0, 0
    for title, comparison in _overconfident(comparisons):
        box, lower, upper = (_row(comparison, name) for name in ("pb", "pb-lower", "pb-upper"))
        if box is None or lower is None or upper is None:
            continue
        total += 1
        less += lower.scores["ece_width"].value >= box.scores["ece_width"].value
        costs += upper.scores["error_rate"].improves is False
        values = ", ".join(
            f"`{row.method}` {100 * row.scores['ece_width'].value:.2f} %" for row in (box, lower, upper)
        )
        lines.append(f"- {title}: ewECE {values}; `pb-upper` changed {upper.changed_labels} labels.")
    head = (
        "### Lower bounds alone gain less than the box, upper bounds alone cost accuracy\n\n"
        f"Lower bounds gain less: {_verdict(less, total)}"
        f" Upper bounds cost accuracy: {_verdict(costs, total)}"
        " A tie that an upper bound makes goes to the larger logit here, so uniform bounds never change a"
        " label; where ties are broken by class order, accuracy is lost.\n"
    )
    return "\n".join([head, *lines, ""])


def _no_harm(comparisons: list[tuple[str, Comparison]]) -> str:
    lines = []
    calm = [pair for pair in comparisons if pair not in list(_overconfident(comparisons))]
    for title, comparison in calm:
        harmed = []
        for row in comparison.rows:
            worse = [name for name, score in row.scores.items() if score.improves is False and score.is_clear]
            if worse:
                harmed.append(f"`{row.method}` in {', '.join(worse)}")
        lines.append(f"- {title}: {'; '.join(harmed) or 'no method'}.")
    head = (
        "### Nothing is harmed on a set that is calibrated already\n\n"
        "Methods that are clearly worse than the one they build on:\n"
    )
    return "\n".join([head, *lines, ""])


def _best(comparisons: list[tuple[str, Comparison]]) -> str:
    lines = []
    for title, comparison in comparisons:
        rows = sorted(comparison.rows, key=lambda row: row.scores["smooth_ece"].value)
        leaders = ", ".join(
            f"`{row.method}` {100 * row.scores['smooth_ece'].value:.2f} %" for row in rows[:3]
        )
        lines.append(f"- {title}: {leaders}.")
    head = (
        "### The best calibrated method\n\n"
        "The paper has `pts+pb` first on its largest sets and `dpb` on CIFAR-100 and 20News."
        " Lowest smECE here:\n"
    )
    return "\n".join([head, *lines, ""])
