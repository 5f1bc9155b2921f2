"""How often the answers are right: by their confidence alone, or corrected by the labels that arrived."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from scipy.special import ndtri

from boxcal.calibrators.monitoring.state import Array, Fold

FEWEST_LABELS = 50
"""Labels from which an interval is given."""

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class ExpectedAccuracy:
    """An estimate of the share of right answers.

    Attributes
    ----------
    basis
        `validation`: mean confidence plus the gap on the validation data, blind to a change of what inputs
        mean. `labels`: prediction-powered, corrected by labels.
    low, high
        A 95 % interval; None with `validation`, for which no honest one exists.
    """

    value: float
    basis: Literal["validation", "labels"]
    low: float | None
    high: float | None


class Accuracy(Fold):
    """Folds confidences of all answers, and whether the labelled ones were right.

    `mean(c, all) + mean(right - c, labelled)`: prediction-powered inference (Angelopoulos et al. 2023). The
    variance of the second term is at least mean c (1 - c), which keeps the interval honest for few labels.

    Parameters
    ----------
    validation_gap
        Accuracy less mean confidence on the validation data.
    """

    STATE: ClassVar[tuple[str, ...]] = ("sums",)

    def __init__(self, validation_gap: float = 0.0) -> None:
        self.validation_gap = validation_gap
        # all: count, sum, sum of squares; labelled: count, sum and sum of squares of right - c, sum of c (1 -
        # c)
        self.sums = np.zeros(7)

    def predicted(self, confidences: Array) -> None:
        """Add the confidences (N,) of answers, labelled or not."""
        c = np.asarray(confidences, dtype=np.float64)
        self.sums[:3] += (len(c), c.sum(), (c**2).sum())

    def labelled(self, confidences: Array, right: Array) -> None:
        """Add the confidences (N,) of labelled answers, and whether each was right (N,) bool."""
        c = np.asarray(confidences, dtype=np.float64)
        gap = np.asarray(right, dtype=np.float64) - c
        self.sums[3:] += (len(c), gap.sum(), (gap**2).sum(), (c * (1.0 - c)).sum())

    def result(self) -> ExpectedAccuracy | None:
        """Return the estimate; None before the first answer."""
        count, total, squares, labels, gap, gap_squares, spread = self.sums
        if not count:
            return None
        mean = total / count
        if labels < FEWEST_LABELS:
            return ExpectedAccuracy(_clip(mean + self.validation_gap), "validation", None, None)
        value = mean + gap / labels
        variance = max(gap_squares / labels - (gap / labels) ** 2, spread / labels) / labels
        variance += max(squares / count - mean**2, 0.0) / count
        radius = float(ndtri(0.5 + LEVEL / 2.0)) * math.sqrt(variance)
        return ExpectedAccuracy(_clip(value), "labels", _clip(value - radius), _clip(value + radius))


def _clip(value: float) -> float:
    return float(min(1.0, max(0.0, value)))
