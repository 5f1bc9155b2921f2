"""The tables of docs/results.md: one for each set, and what `auto` selects."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from benchmarks.paper.sets import METHODS
from benchmarks.paper.statistics import METRICS, Results
from boxcal.calibrators.evaluation.comparison import BASELINE, CLEAR, DEGRADED, IMPROVED, TITLES, base_of

PERCENT = {"error_rate", "smooth_ece", "ece_mass", "ece_width"}
NEEDS = {"nc": "inputs", "ta": "features", "fc": "features"}


def page(documents: list[dict[str, Any]]) -> str:
    found = [Results(one) for one in documents]
    commits = sorted({cell["commit"] for one in documents for cell in one["cells"]})
    measured = f"Measured at commit {', '.join(f'`{one}`' for one in commits)}.\n"
    return "\n".join([measured, *(_set(one) for one in found), _auto(found)]).rstrip() + "\n"


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
        " its splits, selected afterwards. Differences of test NLL with their 95 % interval; above 0 `auto`"
        " is worse.\n",
        "| data set | selected by `auto` | test NLL | best single | `auto` minus best | `auto` minus"
        " `uncalibrated` | s |",
        "|---|---|---:|---|---:|---:|---:|",
    ]
    for one in found:
        if "auto" not in one.cells:
            continue
        chosen = Counter(cell["fitted"] for cell in one.cells["auto"].values())
        best = min((name for name in one.cells if name != "auto"), key=lambda name: one.mean(name, "nll"))
        lines.append(
            f"| {one.title} | {', '.join(f'`{name}` {count}' for name, count in chosen.most_common())}"
            f" | {one.mean('auto', 'nll'):.4f} | `{best}` | {one.difference('auto', best, 'nll')}"
            f" | {one.difference('auto', BASELINE, 'nll')} | {one.mean('auto', 'seconds'):.0f} |"
        )
    return "\n".join(lines) + "\n"
