"""Means over splits, and paired differences with an interval that knows that splits overlap."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t

METRICS = ("error_rate", "smooth_ece", "ece_mass", "ece_width", "nll", "brier")
CONFIDENCE = 0.975
SLACK = 5e-5
"""Smaller changes are invisible in two decimals of a percentage, or four of a loss."""

Value = str | Callable[[dict[str, Any]], float]


@dataclass(frozen=True)
class Difference:
    """Mean of a paired difference, and its 95 % interval, which is infinite for fewer than three splits."""

    value: float
    low: float
    high: float

    @property
    def direction(self) -> int:
        """-1 lower, 1 higher, 0 no visible change."""
        return 0 if abs(self.value) <= SLACK else int(math.copysign(1, self.value))

    @property
    def is_clear(self) -> bool:
        return self.direction != 0 and self.low * self.high > 0

    def __str__(self) -> str:
        if not math.isfinite(self.low):
            return f"{self.value:+.5f}"
        return f"{self.value:+.5f} ({self.low:+.5f} to {self.high:+.5f})"


class Results:
    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self.title: str = document["title"]
        self.cells: dict[str, dict[int, dict[str, Any]]] = {}
        for cell in document["cells"]:
            self.cells.setdefault(cell["method"], {})[cell["split"]] = cell

    def values(self, method: str, value: Value) -> np.ndarray[Any, np.dtype[np.float64]]:
        cells = [self.cells[method][split] for split in sorted(self.cells[method])]
        return np.array([cell[value] if isinstance(value, str) else value(cell) for cell in cells])

    def mean(self, method: str, value: Value) -> float:
        return float(self.values(method, value).mean())

    def spread(self, method: str, value: Value) -> float:
        """Give the standard error of the mean over the splits, as the paper does; nan for one split."""
        values = self.values(method, value)
        return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan

    def difference(self, method: str, other: str, metric: str) -> Difference:
        """Compare two methods on the splits that both have (Nadeau and Bengio 2003).

        The test sets of different splits overlap, and so do their validation sets: the variance of the mean
        over J splits is (1 / J + n_test / n_validation) times that of the differences.
        """
        mine, others = self.cells[method], self.cells[other]
        common = sorted(mine.keys() & others.keys())
        values = np.array([mine[split][metric] - others[split][metric] for split in common])
        if len(values) < 3:
            return Difference(float(values.mean()) if len(values) else math.nan, -math.inf, math.inf)
        overlap = self.document["test_samples"] / self.document["fit_samples"]
        error = math.sqrt((1 / len(values) + overlap) * values.var(ddof=1))
        half = float(t.ppf(CONFIDENCE, len(values) - 1)) * error
        mean = float(values.mean())
        return Difference(mean, mean - half, mean + half)
