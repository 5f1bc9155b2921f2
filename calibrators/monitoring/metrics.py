"""Streaming metrics: NLL with intervals that hold at every time, error rate, Brier score, ECE and accuracy.

The accuracy is estimated from the confidences alone, or corrected by the labels that arrived.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal

import numpy as np

from boxcal.calibrators.monitoring.state import Array, StatefulFold, check_rows

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
        Mean floored NLL in nats, and an interval that covers at all times, with probability 0.95, the mean of
        what was expected of each label so far: also after a change, which it follows slowly.
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

    The interval is the empirical-Bernstein confidence sequence of Howard et al. (2021), theorem 4, for a loss
    scaled to [0, 1]; it needs no mean that stays the same.
    """

    STATE: ClassVar[tuple[str, ...]] = ("sums", "bins")

    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes
        self.largest_nll = -math.log(FLOOR / num_classes)
        # count, errors, Brier, NLL; five of earlier versions, which read this state too; of losses scaled to
        # [0, 1]: their sum, that of the squared deviations from the mean before each, and the count
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
        scaled = losses / self.largest_nll
        before = 0.5 + self.sums[9] + np.cumsum(scaled) - scaled
        means = before / (1.0 + self.sums[11] + index)
        self.sums[9:] += (scaled.sum(), ((scaled - means) ** 2).sum(), len(truth))
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
        radius = self.largest_nll * deviation_bound(float(self.sums[10]), math.log(2.0 / ALPHA)) / count
        return StreamedMetrics(
            count,
            error_rate,
            brier,
            nll,
            max(0.0, nll - radius),
            min(self.largest_nll, nll + radius),
            float(np.abs(confidence - right).sum() / count),
            float(np.sqrt(2.0 * variance / math.pi).sum() / count),
        )


MIXTURE = 2.0
"""Squared deviations at which the boundary is tightest: those of some hundred to thousand labels."""
MIXED = MIXTURE * math.log(MIXTURE) - math.lgamma(MIXTURE) - math.log1p(-(1.0 + MIXTURE) * math.exp(-MIXTURE))
"""The last term is the incomplete gamma function of 2, whose series ends."""


def deviation_bound(variance: float, log_level: float) -> float:
    """Return what a sum of deviations from conditional means does not exceed at any time.

    The gamma-exponential mixture of Howard, Ramdas, McAuliffe and Sekhon, "Time-uniform, nonparametric,
    nonasymptotic confidence sequences" (2021), for losses in [0, 1]. `variance` is the sum of their squared
    deviations from predictions; `log_level` is the logarithm of 1 / alpha.
    """
    shape = variance + MIXTURE
    constant = MIXED + math.lgamma(shape) + variance

    def log_mixture(deviation: float) -> float:
        scale = shape + deviation
        # The share of the gamma distribution above the scale, at most: Chernoff's bound, and one half.
        above = math.exp(shape * math.log(scale / shape) - deviation)
        return constant + deviation - shape * math.log(scale) + math.log(max(0.5, 1.0 - above))

    low, high = 0.0, 1.0
    while log_mixture(high) < log_level:
        low, high = high, 2.0 * high
    while high - low > 1e-9 * high:
        middle = 0.5 * (low + high)
        low, high = (middle, high) if log_mixture(middle) < log_level else (low, middle)
    return high


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


UNSEEN = 2.0
"""So many more wrong and right answers of mean confidence count in the variance, not in the value: where few
wrong ones were seen, as of a model that is sure of everything, the sample says little about how many come."""


class Accuracy(StatefulFold):
    """Folds confidences of all answers, and whether the labelled ones were right.

    `mean(c, all) + mean(right - c, labelled)`: prediction-powered inference (Angelopoulos et al. 2023). The
    variance of the second term is at least mean c (1 - c), and `UNSEEN` wrong and right answers more count in
    it, which keeps the interval honest for few labels.

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
        variance = max(second[2] - 2.0 * gap * second[1] + gap**2 * second[0], spread)
        variance += UNSEEN * second[0] / labels * (mean**2 + (1.0 - mean) ** 2)
        variance /= weight**2
        variance += max(squares / count - mean**2, 0.0) / count
        radius = QUANTILE * math.sqrt(variance)
        return AccuracyEstimate(_clip(value), "labels", _clip(value - radius), _clip(value + radius))


def _clip(value: float) -> float:
    return float(min(1.0, max(0.0, value)))
