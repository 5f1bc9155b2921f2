"""docs/results.md: a table for each set, what `auto` selects, what does harm, and the paper's claims."""

from __future__ import annotations

import math
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.paper.sets import BASES, METHODS, joined
from benchmarks.paper.statistics import METRICS, Difference, Results
from boxcal.calibrators.evaluation.comparison import BASELINE, CLEAR, DEGRADED, IMPROVED, TITLES, base_of

PERCENT = {"error_rate", "smooth_ece", "ece_mass", "ece_width"}
ERRORS = ("smooth_ece", "ece_mass", "ece_width")
NEEDS = {"nc": "inputs", "ta": "features", "fc": "features"}
HEAD = Path(__file__).with_name("head.md")
CLAIMS = (
    ("`pb` beside no calibration", [("pb", BASELINE)]),
    ("`pb` added to another base", [(joined(one, "pb"), one) for one in BASES[1:]]),
    ("`pts` beside `ts`", [("pts", "ts")]),
    ("`pb-mlp` beside `pb`, on any base", [(joined(one, "pb-mlp"), joined(one, "pb")) for one in BASES]),
    ("`lb` beside `pb`, on any base", [(joined(one, "lb"), joined(one, "pb")) for one in BASES]),
    ("`dpb` beside `fc`", [("dpb", "fc")]),
    ("`pb` beside `pb-lower`", [("pb", "pb-lower")]),
    ("`pb` beside `pb-upper`", [("pb", "pb-upper")]),
)
"""What the paper says is better calibrated, and beside what."""


def page(documents: list[dict[str, Any]]) -> str:
    found = [Results(one) for one in documents]
    commits = sorted({cell["commit"] for one in documents for cell in one["cells"]})
    splits = max(len(one.cells[BASELINE]) for one in found)
    head = HEAD.read_text().format(commits=", ".join(f"`{one}`" for one in commits), splits=splits)
    parts = [head, *(_set(one) for one in found), _auto(found), _harm(found), _claims(found)]
    return "\n".join(parts).rstrip() + "\n"


def _set(one: Results) -> str:
    document = one.document
    splits = len(one.cells[BASELINE])
    absent = [name for name in METHODS if name not in one.cells]
    needed = [f"`{name}`" for name in absent if name.split("+")[0] in NEEDS]
    slow = [f"`{name}`" for name in absent if name.split("+")[0] in document["without"]]
    later = [name for name in absent if f"`{name}`" not in needed + slow]
    text = (
        f"## {one.title}\n\n{document['classes']:,} classes, fitted to {document['fit_samples']:,} samples,"
        f" evaluated on {document['test_samples']:,}; number of splits: {splits}. Mean confidence minus"
        f" accuracy without calibration: {100 * document['confidence_beyond_accuracy']:+.1f} %."
        f" {document['remark']}"
    ).rstrip()
    if needed:
        text += f" Without {', '.join(needed)}, which require features or inputs."
    if slow:
        text += f" Without {', '.join(slow)}, whose fits take too long for this table."
    if later:
        text += f" Not run yet: {', '.join(f'`{name}`' for name in later)}."
    return f"{text}\n\n{_table(one)}"


def _table(one: Results) -> str:
    lines = [
        "| method | "
        + " | ".join(TITLES[name] for name in METRICS)
        + " | changed labels | splits | fit, s |",
        "|---|" + "---:|" * (len(METRICS) + 3),
    ]
    shown = [name for name in METHODS if name in one.cells]
    for method in shown:
        cells = []
        for metric in METRICS:
            text = _value(one, method, metric)
            if _number(text) == min(_number(_value(one, name, metric)) for name in shown):
                text = f"**{text}**"
            cells.append(f"{text} {_mark(one, method, metric)}".rstrip())
        changed, seconds = one.mean(method, "changed_labels"), one.mean(method, "seconds")
        cells += [f"{changed:.0f}", str(len(one.cells[method])), f"{seconds:.1f}"]
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _value(one: Results, method: str, metric: str) -> str:
    scale, decimals = (100, 2) if metric in PERCENT else (1, 4)
    value, error = scale * one.mean(method, metric), scale * one.spread(method, metric)
    if not math.isfinite(value):
        return "infinite"
    shown = f"{value:.{decimals}f}"
    return f"{shown} ({error:.{decimals}f})" if math.isfinite(error) else shown


def _number(text: str) -> float:
    return float(text.split(maxsplit=1)[0].replace("infinite", "inf"))


def _mark(one: Results, method: str, metric: str) -> str:
    base = base_of(method)
    if base not in one.cells:
        return ""
    difference = one.difference(method, base, metric)
    sign = {-1: IMPROVED, 0: "", 1: DEGRADED}[difference.direction]
    return sign + (CLEAR if difference.is_clear else "")


def _auto(found: list[Results]) -> str:
    lines = [
        "## `auto`, compared with the best single method and with no calibration\n",
        "`auto` uses the validation set only. The best single method is that of the lowest mean test NLL over"
        " its splits, selected afterwards. Differences of test NLL with their 95 % interval; below 0 `auto`"
        " is better.\n",
        "| data set | most often the answer of `auto` | test NLL | best single | `auto` minus best"
        " | `auto` minus `uncalibrated` | s |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for one in (one for one in found if "auto" in one.cells):
        cells = one.cells["auto"].values()
        [(name, count)] = Counter(cell["fitted"] for cell in cells).most_common(1)
        best = min((name for name in one.cells if name != "auto"), key=lambda name: one.mean(name, "nll"))
        lines.append(
            f"| {one.title} | `{name}` {count} of {len(cells)} | {one.mean('auto', 'nll'):.4f}"
            f" | `{best}` {one.mean(best, 'nll'):.4f} | {one.difference('auto', best, 'nll')}"
            f" | {one.difference('auto', BASELINE, 'nll')} | {one.mean('auto', 'seconds'):.0f} |"
        )
    return "\n".join(lines) + "\n"


def _harm(found: list[Results]) -> str:
    lines = [
        "## Harm\n",
        "Every method that is clearly worse than no calibration, in any metric on any set.\n",
        "| data set | method | worse in | while NLL changes by |",
        "|---|---|---|---:|",
    ]
    for one in found:
        for method in (name for name in METHODS if name in one.cells):
            against = {name: one.difference(method, BASELINE, name) for name in METRICS}
            worse = [
                f"{TITLES[name]} {' to '.join(_value(one, of, name).split()[0] for of in (BASELINE, method))}"
                for name, difference in against.items()
                if difference.is_clear and difference.direction > 0
            ]
            if worse:
                change = against["nll"].value
                lines.append(f"| {one.title} | `{method}` | {'; '.join(worse)} | {change:+.4f} |")
    return "\n".join(lines) + "\n"


def _claims(found: list[Results]) -> str:
    lines = [
        "## The paper's claims, held against these tables\n",
        "How often the first is lower than the second in smECE, emECE or ewECE, and how often higher; in"
        " brackets how often clearly. The rest is equal: at the optimum of a joint fit the bounds are often"
        " inactive. The paper finds the first better in each row but that of `lb`, which it finds less"
        " stable.\n",
        "| compared | " + " | ".join(one.title for one in found) + " | all |",
        "|---|" + "---:|" * (len(found) + 1),
    ]
    for title, pairs in CLAIMS:
        differences = [
            [one.difference(*pair, name) for pair in pairs if {*pair} <= one.cells.keys() for name in ERRORS]
            for one in found
        ]
        cells = [_counted(some) for some in (*differences, list(chain.from_iterable(differences)))]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _counted(differences: list[Difference]) -> str:
    def count(sign: int) -> str:
        of_sign = [one.is_clear for one in differences if one.direction == sign]
        return f"{len(of_sign)} ({sum(of_sign)})"

    return f"{count(-1)} lower, {count(1)} higher" if differences else ""
