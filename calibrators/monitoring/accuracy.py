"""How often the answers are right: by their confidence alone, or corrected by the labels that arrived."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal

import numpy as np

from boxcal.calibrators.monitoring.state import Array, StatefulFold

FEWEST_LABELS = 50
"""Labels from which an interval is given."""

LEVEL = 0.95
QUANTILE = NormalDist().inv_cdf(0.5 + LEVEL / 2.0)


@dataclass(frozen=True, slots=True)
class AccuracyEstimate:
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


class Accuracy(StatefulFold):
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
        # all: count, sum and sum of squares of c; labelled, with g = right - c and weights w: count, sums of
        # w, w g, w^2, w^2 g, w^2 g^2 and w^2 c (1 - c)
        self.sums = np.zeros(10)

    def predicted(self, confidences: Array) -> None:
        """Add the confidences (N,) of answers, labelled or not."""
        c = np.asarray(confidences, dtype=np.float64)
        self.sums[:3] += (len(c), c.sum(), (c**2).sum())

    def labelled(self, confidences: Array, right: Array, propensities: Array | None = None) -> None:
        """Add the confidences (N,) of labelled answers, and whether each was right (N,) bool.

        Parameters
        ----------
        propensities
            (N,) probabilities with which these answers were chosen to be labelled, equal unless given: each
            counts by the inverse (Hajek's estimator).
        """
        c = np.asarray(confidences, dtype=np.float64)
        gap = np.asarray(right, dtype=np.float64) - c
        w = np.ones_like(c) if propensities is None else 1.0 / np.asarray(propensities, dtype=np.float64)
        v = w**2
        self.sums[3:6] += (len(c), w.sum(), (w * gap).sum())
        self.sums[6:] += (v.sum(), (v * gap).sum(), (v * gap**2).sum(), (v * c * (1.0 - c)).sum())

    def result(self) -> AccuracyEstimate | None:
        """Return the estimate; None before the first answer."""
        count, total, squares, labels, weight, weighted, *second, spread = self.sums
        if not count:
            return None
        mean = total / count
        if labels < FEWEST_LABELS:
            return AccuracyEstimate(_clip(mean + self.validation_gap), "validation", None, None)
        gap = weighted / weight
        value = mean + gap
        # sum of w^2 (g - gap)^2, at least that of answers whose confidence is right
        variance = max(second[2] - 2.0 * gap * second[1] + gap**2 * second[0], spread) / weight**2
        variance += max(squares / count - mean**2, 0.0) / count
        radius = QUANTILE * math.sqrt(variance)
        return AccuracyEstimate(_clip(value), "labels", _clip(value - radius), _clip(value + radius))


def _clip(value: float) -> float:
    return float(min(1.0, max(0.0, value)))
