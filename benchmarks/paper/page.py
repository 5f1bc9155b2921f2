"""Writes docs/results.md: tables of the stored results, `auto`, harm, and the claims of the paper."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

from benchmarks.paper.claims import claims
from benchmarks.paper.sets import ADDITIONS, BASES, METHODS, joined
from benchmarks.paper.statistics import BASELINE, METRICS, Results, base_of
from boxcal.calibrators.evaluation.tables import CLEAR, DEGRADED, IMPROVED, TITLES

PERCENT = {"error_rate", "smooth_ece", "ece_mass", "ece_width"}
NEEDS = {"nc": "inputs", "ta": "features", "fc": "features"}

HEAD = f"""# Results on real data

The methods of the main table of the paper, each base alone and with `pb`, `lb` and `pb-mlp`, and other
common methods. `python -m benchmarks.paper FOLDER...` generates this page; the data sets are not part of the
project. Each method is fitted to the validation set and evaluated on the test set, then on random
redistributions of both: ten splits, fewer where the fits of a method take longer than two minutes in all
(column *splits*). Numbers are means over the splits, with their standard error in brackets. The networks,
splits and sizes differ from those of the paper, so this page compares its findings, not its numbers. Times
are processor times; what a method contains, and has been fitted before on the same
split, is not fitted again. The run time of the operator is in [Benchmarks](benchmarks.md#the-operator).

Lower is better. {IMPROVED} lower and {DEGRADED} higher than the base method. `{CLEAR}`: the 95 % interval
of the difference, paired by split, does not contain 0; it is that of Nadeau and Bengio (2003), which accounts
for the overlap of the splits. Bold: the best of its column.
"""


def page(documents: list[dict[str, Any]]) -> str:
    """Return the page for the stored results of each set."""
    found = [Results(one) for one in documents]
    parts = [HEAD, *(_set(one) for one in found), _auto(found), _harm(found)]
    parts += [_containment(found), claims(found)]
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


def _harm(found: list[Results]) -> str:
    lines = [
        "## Harm\n",
        "Every method that is clearly worse than no calibration, in any metric on any set.\n",
        "| data set | method | worse in | while NLL changes by |",
        "|---|---|---|---:|",
    ]
    for one in found:
        for method in METHODS:
            if method not in one.cells or method == BASELINE:
                continue
            worse = []
            for metric in METRICS:
                change = one.difference(method, BASELINE, metric)
                if change.is_clear and change.direction > 0:
                    before, after = (_value(one, name, metric).split()[0] for name in (BASELINE, method))
                    worse.append(f"{TITLES[metric].removesuffix(' %')} {before} to {after}")
            if worse:
                change = one.difference(method, BASELINE, "nll")
                lines.append(f"| {one.title} | `{method}` | {'; '.join(worse)} | {change.value:+.4f} |")
    return "\n".join(lines) + "\n"


def _containment(found: list[Results]) -> str:
    lines = [
        "## Fits and the methods that they contain\n",
        "The validation NLL of each fit, minus the lowest of the methods that it contains, on the same"
        " split: no calibration, its base, the same with `pb` where it has `pb-mlp`, and the same with `ts`"
        " where it has `pts` or `ets`. `ets+lb` limits log probabilities, so it does not contain `ts+lb`."
        " Values are stored with six digits.\n",
        "| data set | fits compared | largest difference, nats |",
        "|---|---:|---:|",
    ]
    for one in found:
        excesses = []
        for base, addition in itertools.product(BASES, ADDITIONS):
            for split, cell in one.cells.get(joined(base, addition), {}).items():
                others = [one.cells[name] for name in _contained(base, addition) if name in one.cells]
                lowest = min(
                    (cells[split]["validation_nll"] for cells in others if split in cells), default=None
                )
                if lowest is not None:
                    excesses.append(cell["validation_nll"] - lowest)
        lines.append(f"| {one.title} | {len(excesses)} | {max(excesses, default=math.nan):+.1e} |")
    return "\n".join(lines) + "\n"


def _contained(base: str, addition: str) -> set[str]:
    """Name the methods that a base with an addition contains."""
    names = {BASELINE, base}
    if addition == "pb-mlp":
        names.add(joined(base, "pb"))
    if base in {"pts", "ets"} and (base, addition) != ("ets", "lb"):
        names.add(joined("ts", addition))
    return names - {joined(base, addition)}
