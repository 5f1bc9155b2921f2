"""Writes a comparison of methods as Markdown or CSV."""

from __future__ import annotations

import csv
import io
import math

from boxcal.calibrators.evaluation.comparison import METRICS, MethodComparison, MetricScore

TITLES = {
    "error_rate": "Error rate %",
    "smooth_ece": "smECE %",
    "ece_mass": "emECE %",
    "ece_width": "ewECE %",
    "nll": "NLL",
    "brier": "Brier",
}
IMPROVED, DEGRADED, CLEAR = "▼", "▲", "*"
LEGEND = (
    f"Lower is better; the standard error is in brackets. {IMPROVED} lower and {DEGRADED} higher than the"
    f" base method; `{CLEAR}`: the paired 95 % interval does not contain 0; bold: the best of its column."
)
_IN_PERCENT = {"error_rate", "smooth_ece", "ece_mass", "ece_width"}


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
