"""Metrics before and after a calibrator as a table: the part of a report that people read first."""

from typing import Any

from rich.table import Table

from boxcal.app.cli.output import plain_table

TITLES = {
    "error_rate": "error rate",
    "nll": "NLL",
    "brier": "Brier score",
    "ece_width": "ECE (equal width)",
    "ece_mass": "ECE (equal mass)",
    "smooth_ece": "smooth ECE",
    "debiased_ece": "debiased ECE",
    "ks": "KS error",
    "classwise_ece": "classwise ECE",
    "brier_calibration": "Brier: calibration",
    "brier_refinement": "Brier: refinement",
    "mce": "MCE",
}


def metrics_table(metrics: dict[str, Any]) -> Table:
    """Lay out a report's `metrics`: each value with its 95 % interval, and the paired difference."""
    table = plain_table("", "before", "after", "difference (95 % interval)")
    for name, sides in metrics.items():
        table.add_row(
            TITLES.get(name, name),
            _number(sides["before"]["value"]),
            _number(sides["after"]["value"]),
            _estimate(sides["difference"]),
        )
    return table


def _estimate(estimate: dict[str, float | None]) -> str:
    value, low, high = (_number(estimate[part], "+.4f") for part in ("value", "low", "high"))
    return f"{value} ({low} to {high})"


def _number(value: float | None, form: str = ".4f") -> str:
    return "infinite" if value is None else format(value, form)


def judgement_table(metrics: dict[str, Any]) -> Table:
    """Lay out the metrics of one model, the calibration errors beside what perfect calibration would give."""
    table = plain_table("", "value", "95 % interval", "if calibrated", "p-value")
    for name, found in metrics.items():
        interval = f"{_number(found['low'])} to {_number(found['high'])}"
        perfect = _number(found["perfect"]) if "perfect" in found else ""
        chance = f"{found['p_value']:.3f}" if "p_value" in found else ""
        table.add_row(TITLES.get(name, name), _number(found["value"]), interval, perfect, chance)
    return table
