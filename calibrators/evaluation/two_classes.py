"""Two classes: what risk models are asked for, of the probability p of the second class, the event.

The ratio of observed to expected events, the calibration intercept and slope (Cox 1958), Spiegelhalter's
test (1986), and a reliability curve. Intervals are from sandwich variances, in which samples of a group count
together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from boxcal.calibrators.evaluation.bootstrap import LEVEL, NORMAL, Estimate, proportion_estimate
from boxcal.calibrators.evaluation.outcomes import Indices, Outcomes, Vector
from boxcal.calibrators.label_checks import logistic

SMALLEST = 1e-15
"""Of p and of 1 - p, for their log odds."""
UNKNOWN = Estimate(math.nan, math.nan, math.nan)
BINS, HISTOGRAM_BINS = 10, 40


@dataclass(frozen=True)
class EventCalibration:
    """Calibration of the probability of an event, on N samples."""

    observed: float  # Events, weighted
    expected: float  # Sum of the probabilities
    ratio: Estimate  # Observed to expected: above 1 the model gives too few
    intercept: Estimate  # Log odds that are missing on average; 0 if calibrated
    slope: Estimate  # Of the log odds; below 1 they are too extreme, unknown where they separate the classes
    z: float  # Spiegelhalter's statistic, standard normal if calibrated
    p_value: float
    curve: dict[str, Any]  # `bins` and `histogram`; see `event_curve`

    def to_dict(self) -> dict[str, Any]:
        """Return the numbers as a JSON-ready document: what is not finite becomes None."""
        known = math.isfinite(self.z)
        return {
            "observed": self.observed,
            "expected": self.expected,
            "ratio": self.ratio.to_dict(),
            "intercept": self.intercept.to_dict(),
            "slope": self.slope.to_dict(),
            "spiegelhalter": {"z": self.z if known else None, "p_value": self.p_value if known else None},
            **self.curve,
        }


def event_curve(p: Vector, y: Vector, weights: Vector, groups: Indices | None = None) -> dict[str, Any]:
    """Return the data of a reliability curve on the axis of the log odds, for JSON.

    `p`: (N,), probabilities of the event. `y`: (N,), 1 where it happened, else 0. `weights`: (N,).
    `groups`: int64 (N,), samples of one group are not independent.

    Returns `bins`, at most ten, each with its `count`, `probability` (the mean), `observed` (the share of
    events), and the 95 % interval of this, `observed_low` to `observed_high`. All have about the same sum of
    p (1 - p), the information on log odds: bins of equal mass hold no event where one sample in a hundred has
    one. Equal probabilities are in one bin. `histogram` counts `events` and `others` between `edges`, which
    are equally spaced log odds.
    """
    values, index = np.unique(p, return_inverse=True)
    information = np.bincount(index, weights=weights * p * (1.0 - p))
    middle = (np.cumsum(information) - information / 2) / max(information.sum(), SMALLEST)
    bins = np.minimum((BINS * middle).astype(np.int64), BINS - 1)[index]
    found = []
    for inside in (bins == number for number in np.unique(bins)):
        observed = proportion_estimate(y[inside], weights[inside], None if groups is None else groups[inside])
        found.append(
            {
                "count": int(inside.sum()),
                "probability": float(np.average(p[inside], weights=weights[inside])),
                "observed": observed.value,
                "observed_low": observed.low,
                "observed_high": observed.high,
            }
        )
    odds = _log_odds(values[[0, -1]])
    low, high = (odds[0] - 0.5, odds[1] + 0.5) if odds[0] == odds[1] else odds
    edges = np.linspace(low, high, HISTOGRAM_BINS + 1)
    sides = {"events": y == 1.0, "others": y == 0.0}
    counts = {name: np.histogram(_log_odds(p[side]), edges)[0].tolist() for name, side in sides.items()}
    shown = 1.0 / (1.0 + np.exp(-edges))
    return {"bins": found, "histogram": {"edges": shown.tolist(), **counts}}


def _log_odds(p: Vector) -> Vector:
    return np.log(np.clip(p, SMALLEST, None)) - np.log(np.clip(1.0 - p, SMALLEST, None))


def event_calibration(scored: Outcomes) -> EventCalibration | None:
    """Judge the probability of the second of two classes; None for more classes.

    Of G groups the variances are G / (G - 1) times the sandwich, and quantiles are of t with G - 1 degrees of
    freedom: few groups say little about how groups vary.
    """
    from scipy.special import stdtr, stdtrit  # noqa: PLC0415 - a service that only predicts needs no scipy

    if scored.probabilities.shape[1] != 2:
        return None
    p = scored.probabilities.at(slice(None))[:, 1]
    y = (scored.labels == 1).astype(np.float64)
    weights = np.ones(len(y)) if scored.weights is None else scored.weights
    units, freedom, unbiased, reach = np.arange(len(y)), math.inf, 1.0, NORMAL
    if scored.groups is not None:
        units = np.unique(scored.groups, return_inverse=True)[1]
        freedom = max(1, int(units.max()))  # groups less one
        unbiased, reach = (freedom + 1) / freedom, float(stdtrit(freedom, (1 + LEVEL) / 2))

    def spread(scores: Vector) -> Any:
        """Sum the outer products of the scores (N, M) of each group."""
        sums = np.stack([np.bincount(units, weights=column) for column in (weights[:, None] * scores).T])
        return unbiased * (sums @ sums.T)

    observed, expected = float(weights @ y), float(weights @ p)
    ratio = UNKNOWN
    if observed > 0 and expected > 0:
        value = observed / expected
        error = math.sqrt(spread((y - value * p)[:, None])[0, 0]) / observed
        ratio = Estimate(value, value * math.exp(-reach * error), value * math.exp(reach * error))
    odds = _log_odds(p)
    ones = np.ones((len(y), 1))
    (intercept,) = _logistic(ones, odds, y, weights, spread, reach=reach) or (UNKNOWN,)
    both = np.column_stack([ones, odds])
    *_, slope = _logistic(both, 0.0 * odds, y, weights, spread, reach=reach) or (UNKNOWN,)
    excess = (y - p) * (1.0 - 2.0 * p)
    variance = (weights**2 * (1.0 - 2.0 * p) ** 2 * p * (1.0 - p)).sum()
    if scored.groups is not None:
        variance = spread(excess[:, None])[0, 0]
    z = float(weights @ excess) / math.sqrt(variance) if variance > 0 else math.nan
    p_value = 2.0 * float(stdtr(freedom, -abs(z)))
    curve = event_curve(p, y, weights, scored.groups)
    return EventCalibration(observed, expected, ratio, intercept, slope, z, p_value, curve)


def _logistic(
    inputs: Any, offset: Vector, y: Vector, weights: Vector, spread: Any, *, reach: float
) -> list[Estimate]:
    """Give the coefficients of a logistic regression with their intervals; [] if there is no optimum."""
    found = logistic(inputs, offset, y, weights)
    if found is None:
        return []
    scores = (y - found.probabilities)[:, None] * inputs
    errors = np.sqrt(np.diag(found.covariance @ spread(scores) @ found.covariance))
    return [
        Estimate(value, value - reach * error, value + reach * error)
        for value, error in zip(found.coefficients.tolist(), errors.tolist(), strict=True)
    ]
