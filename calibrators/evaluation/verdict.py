"""The verdict on two calibrators, which decides about an activation with `if_better`, and its sentence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from boxcal.calibrators.evaluation.bootstrap import LEVEL, Estimate

TOLERANCE = 1e-5
"""A smaller difference, in nats or in the unit of the score, is never significant."""
LOSSES = ("nll", "brier")
NAMES = {"nll": "NLL", "brier": "Brier score", "smooth_ece": "smooth ECE"}
LEVELS = {"nll": LEVEL, "brier": 1 - (1 - LEVEL) / 3, "smooth_ece": 1 - (1 - LEVEL) / 3}
"""Levels of the intervals; the upper end counts for NLL, the lower for Brier score, both for smooth ECE.

The probabilities of errors, 2.5 % and three times 0.83 %, sum to 5 %: the four bounds hold together with
probability `LEVEL` (Bonferroni).
"""


@dataclass(frozen=True)
class Verdict:
    """The verdict from three paired differences, new minus active: below 0 the new calibrator is better."""

    active: str  # The method of the active calibrator
    # `nll`, `brier` and `smooth_ece`, each with an interval of its level in `LEVELS`
    differences: Mapping[str, Estimate]

    @property
    def is_better(self) -> bool:
        """Whether NLL is significantly lower, or smooth ECE is and no loss higher; nothing clearly higher.

        One or two of a few dozen samples decide about the NLL, and its interval is wide; smooth ECE is
        bounded.
        """
        return (self._is_lower or self._is_calibrated) and not self._higher

    @property
    def _is_lower(self) -> bool:
        """Whether NLL is significantly lower, or infinite for the active calibrator only."""
        nll = self.differences["nll"]
        return bool(nll.value == -math.inf or (nll.high < 0 and nll.value < -TOLERANCE))

    @property
    def _is_calibrated(self) -> bool:
        return _is_calibrated({name: one.to_dict() for name, one in self.differences.items()})

    @property
    def _higher(self) -> list[str]:
        others = [name for name in self.differences if name != "nll"]
        return [
            name
            for name in others
            if self.differences[name].low > 0 and self.differences[name].value > TOLERANCE
        ]

    @property
    def reason(self) -> str:
        """The verdict as a sentence without its full stop."""
        than = f"significantly lower than with `{self.active}`"
        if not self._is_lower and self._is_calibrated:
            losses = " nor ".join(self._shown(name) for name in LOSSES)
            return f"on unseen folds {self._shown('smooth_ece')} is {than}, and neither {losses} is higher"
        if not self._is_lower:
            return f"on unseen folds {self._shown('nll')} is not {than}"
        lower = f"on unseen folds {self._shown('nll')} is {than}"
        if self._higher:
            higher = " and ".join(self._shown(name) for name in self._higher)
            return f"{lower}, but {higher} significantly higher"
        return f"{lower}, and neither Brier score nor smooth ECE is significantly higher"

    def _shown(self, name: str) -> str:
        one = self.differences[name]
        if not math.isfinite(one.value):
            return f"{NAMES[name]} ({'no longer ' if one.value < 0 else ''}infinite)"
        return f"{NAMES[name]} ({one.value:+.3g}, interval [{one.low:+.3g}, {one.high:+.3g}])"

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as a JSON-ready document."""
        return {
            "is_better": self.is_better,
            "reason": self.reason,
            "joint_level": LEVEL,
            "joint_intervals": {name: one.to_dict() for name, one in self.differences.items()},
        }


def sentence(report: Mapping[str, Any]) -> str:
    """Begin a report with whether to use its calibrator; `report` is its document, or that of `evaluate`."""
    against, metrics = report.get("against"), report["metrics"]
    found = {name: metrics[name]["difference"] for name in NAMES}
    before, other = metrics["nll"]["before"], ""
    raw = found["nll"]
    if against:
        before, raw = against["metrics"]["nll"]["active"], against["metrics"]["nll"]["difference"]
        found = against["joint_intervals"]
        other = "" if against["method"] == "uncalibrated" else f" against `{against['method']}`"
    higher = [name for name in NAMES if name != "nll" and _sign(found[name]) > 0]
    if metrics["nll"]["after"]["value"] is None:
        sign, said = (0 if before["value"] is None else 1), "NLL is infinite: a true class has probability 0"
    elif before["value"] is None:
        sign, said = -1, "NLL is no longer infinite"
    elif max(abs(raw["low"]), abs(raw["high"])) <= TOLERANCE:
        sign, said = 0, "NLL does not change"
    elif _sign(found["nll"]) == 0 and _is_calibrated(found):
        said = _change("smooth_ece", found["smooth_ece"]) + ", and neither NLL nor Brier score rises"
        sign = -1
    else:
        sign, said = _sign(found["nll"]), _change("nll", found["nll"])
    if higher:
        said += ", but " if sign < 0 else ", and "
        said += " and ".join(_change(name, found[name]) for name in higher)
    serious = {warning["code"] for warning in report["warnings"] if warning["severity"] == "serious"}
    if higher or sign > 0:
        lead = "Do not use it"
    elif sign == 0:
        lead = "No clear gain"
    elif serious == {"known_rows"}:
        lead = "Judge it on other data"
    elif serious:
        lead = "Correct the data first"
    else:
        lead = "Use it"
    return f"{lead}: {said}{other}."


def _is_calibrated(found: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether smooth ECE is significantly lower, and both losses on the samples are no higher."""
    values = [found[name]["value"] for name in LOSSES]
    return _sign(found["smooth_ece"]) < 0 and all(value is not None and value <= 0 for value in values)


def _sign(change: Mapping[str, Any]) -> int:
    """Return -1 or 1 where a difference is clearly below or above 0."""
    if change["value"] is None or abs(change["value"]) <= TOLERANCE:
        return 0
    return int(change["low"] > 0) - int(change["high"] < 0)


def _change(name: str, change: Mapping[str, Any]) -> str:
    low, high = change["low"], change["high"]
    digits = 3 if min(abs(low), abs(high)) >= 0.0005 else 5
    sign = _sign(change)
    if sign == 0:
        return f"{NAMES[name]} is not clearly different ({low:+.{digits}f} to {high:+.{digits}f})"
    near, by, far = (f"{size:.{digits}f}" for size in sorted(map(abs, (low, change["value"], high))))
    return f"{NAMES[name]} {'falls' if sign < 0 else 'rises'} by {by} ({near} to {far})"
