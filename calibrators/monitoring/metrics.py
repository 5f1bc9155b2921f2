"""Streaming metrics: NLL with intervals that hold at every time, error rate, Brier score and ECE."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from boxcal.calibrators.monitoring.state import Array, StatefulFold, check_rows
from boxcal.calibrators.operator.compiling import compiled

FLOOR = 1e-4
"""The NLL is of (1 - FLOOR) p + FLOOR / K, so that it is bounded."""

NUM_BINS = 15
ALPHA = 0.05


@dataclass(frozen=True, slots=True)
class StreamedMetrics:
    """Metrics of the labels so far.

    Attributes
    ----------
    nll, nll_low, nll_high
        Mean floored NLL in nats, and an interval that covers its mean at all times with probability 0.95; it
        is wide enough for all times, and follows a change slowly.
    ece, ece_if_calibrated
        Expected calibration error over 15 bins of equal width, and its mean under perfect calibration.
    """

    count: int
    error_rate: float
    brier: float
    nll: float
    nll_low: float
    nll_high: float
    ece: float
    ece_if_calibrated: float


class RunningMetrics(StatefulFold):
    """Folds rows (N, K) and labels (N,) into metrics.

    The interval is the predictable-mixture empirical-Bernstein sequence of Waudby-Smith and Ramdas,
    "Estimating means of bounded random variables by betting" (2024), theorem 2, for a loss scaled to [0, 1].
    """

    STATE: ClassVar[tuple[str, ...]] = ("sums", "bins")

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.largest_nll = -math.log(FLOOR / num_classes)
        # count, errors, Brier, NLL, and the sequence of `_bernstein`
        self.sums = np.zeros(12)
        self.sums[8] = 1.0
        self.bins = np.zeros((4, NUM_BINS))

    def update(self, probabilities: Array, labels: Array) -> None:
        """Add (N,) labels of rows (N, K)."""
        rows, truth = check_rows(probabilities, labels, self.num_classes)
        index = np.arange(len(truth))
        top = rows.argmax(1)
        confidence, right = rows[index, top], top == truth
        self.sums[0] += len(truth)
        self.sums[1] += (~right).sum()
        self.sums[2] += (rows**2).sum() - 2.0 * rows[index, truth].sum() + len(truth)
        losses = -np.log((1.0 - FLOOR) * rows[index, truth] + FLOOR / self.num_classes)
        self.sums[3] += losses.sum()
        _bernstein(losses / self.largest_nll, math.log(2.0 / ALPHA), self.sums[4:])
        bins = np.clip(np.ceil(confidence * NUM_BINS).astype(int) - 1, 0, NUM_BINS - 1)
        variance = confidence * (1.0 - confidence)
        for row, values in enumerate((np.ones(len(truth)), confidence, right, variance)):
            self.bins[row] += np.bincount(bins, values, NUM_BINS)

    def result(self) -> StreamedMetrics:
        """Return the metrics; nan where nothing was seen."""
        count = int(self.sums[0])
        if not count:
            return StreamedMetrics(0, *[math.nan] * 7)
        error_rate, brier, nll = (float(total / count) for total in self.sums[1:4])
        _, confidence, right, variance = self.bins
        return StreamedMetrics(
            count,
            error_rate,
            brier,
            nll,
            float(self.sums[7] * self.largest_nll),
            float(self.sums[8] * self.largest_nll),
            float(np.abs(confidence - right).sum() / count),
            float(np.sqrt(2.0 * variance / math.pi).sum() / count),
        )


@compiled
def _bernstein(losses: Array, log_level: float, sequence: Array) -> None:
    """Fold losses in [0, 1] into the interval, `sequence[3:5]`.

    It is not intersected with the earlier ones: the mean may have changed since.

    `sequence` holds the sums of stakes, of stakes times losses and of penalties, the interval, the sums of
    losses and of squared deviations, and the count.
    """
    # With the mean m and the variance s^2 of the t - 1 losses before, begun with 1/2 and 1/4:
    #   stake = min(1/2, sqrt(2 log(2 / alpha) / (s^2 t log(t + 1))))
    #   centre = sum(stake x) / sum(stake)
    #   radius = (log(2 / alpha) + sum((x - m)^2 (-log(1 - stake) - stake))) / sum(stake)
    for n in range(losses.shape[0]):
        seen = sequence[7]
        mean = (0.5 + sequence[5]) / (seen + 1.0)
        variance = (0.25 + sequence[6]) / (seen + 1.0)
        stake = min(0.5, math.sqrt(2.0 * log_level / (variance * (seen + 1.0) * math.log(seen + 2.0))))
        deviation = (losses[n] - mean) ** 2
        sequence[0] += stake
        sequence[1] += stake * losses[n]
        sequence[2] += deviation * (-math.log1p(-stake) - stake)
        sequence[5] += losses[n]
        sequence[7] = seen + 1.0
        sequence[6] += (losses[n] - (0.5 + sequence[5]) / (seen + 2.0)) ** 2
        centre, radius = sequence[1] / sequence[0], (log_level + sequence[2]) / sequence[0]
        sequence[3], sequence[4] = max(0.0, centre - radius), min(1.0, centre + radius)
