"""The paper's guarantee for two classes: a limit on probability bounding's smooth calibration error."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.evaluation.outcomes import Vector

UPDATE_LIMIT = 4.0
"""The theorem's limit on the update of a logit."""


@dataclass(frozen=True)
class SmoothCalibrationBound:
    """An upper bound on the smooth calibration error (smCE) of probability bounding, and its parts."""

    bound: float  # smCE is at most this with probability at least 1 - delta. Above 1 it says nothing.
    # Empirical post-processing gap: the NLL, in nats, that the best 1-Lipschitz update of the logit would
    # still gain on the validation set
    gap: float
    deviation: float  # The part due to chance in N samples
    delta: float  # Probability with which the bound may fail

    def to_dict(self) -> dict[str, float]:
        """Return the four numbers by name."""
        return asdict(self)


def smooth_calibration_bound(
    probability: ArrayLike, labels: ArrayLike, lower: float, upper: float, *, delta: float = 0.05
) -> SmoothCalibrationBound:
    """Bound the smooth calibration error of fitted probability bounding on two classes.

    With a~ = max(lower, 1 - upper), k the least whole number with a~ >= 2^-k, and B = log(2^k - 1),

        smCE^2 <= gap / 2 + (42 B + 144 + (B + 2) sqrt(log(2^(k+2) / delta) / 2)) / sqrt(N),

    the paper's theorem on the smooth calibration error (its section 3.1). The bounds must have been fitted by
    minimising the NLL on these very samples.

    `probability`: (N,), probability of class 1 under the fitted bounds. `labels`: (N,), 0 or 1. `lower`,
    `upper`: the fitted bounds a in [0, 1/2] and b in [1/2, 1]; at least one must be tighter than 0 and 1.
    """
    values, truth = np.asarray(probability, dtype=np.float64), np.asarray(labels)
    tight = max(lower, 1 - upper)
    if values.ndim != 1 or values.shape != truth.shape or not len(values):
        raise InvalidDataError(
            f"probability and labels must be of shape (N,), not {values.shape}, {truth.shape}"
        )
    if not 0 < tight <= 0.5:
        raise InvalidDataError(f"max(lower, 1 - upper) must lie in (0, 1/2], not {tight}: vacuous bounds")
    if not 0 < delta < 1:
        raise InvalidDataError(f"delta must lie between 0 and 1, not be {delta}")
    for wrong, what in (
        (~((values >= tight - 1e-9) & (values <= 1 - tight + 1e-9)), f"outside [{tight}, {1 - tight}]"),
        (~np.isin(truth, (0, 1)), "whose label is neither 0 nor 1"),
    ):
        if wrong.any():
            row = int(np.argmax(wrong))
            raise InvalidDataError(f"row {row} has probability {values[row]}, label {truth[row]}: {what}")
    k = max(1, math.ceil(-math.log2(tight)))
    size = math.log(2.0**k - 1)
    chance = (size + 2) * math.sqrt(math.log(2.0 ** (k + 2) / delta) / 2)
    deviation = (42 * size + 144 + chance) / math.sqrt(len(values))
    gap = post_processing_gap(np.log(values) - np.log1p(-values), truth.astype(np.float64))
    return SmoothCalibrationBound(math.sqrt(gap / 2 + deviation), gap, deviation, delta)


def post_processing_gap(logit: Vector, labels: Vector) -> float:
    """Return the NLL that the best 1-Lipschitz update of the logit could gain, in nats: never too small.

    Only the update's values at the samples matter, so it is sought as its first value, at most 4 in size,
    and its slopes between neighbouring logits, each in [-1, 1]: a convex problem in a box. The gradient
    bounds the distance to the optimum, and that distance is added. The theorem's limit of 4 on every other
    value is dropped, which can only enlarge the gap.

    `logit`: float64 (N,), log(p / (1 - p)) of the probability p of class 1. `labels`: float64 (N,), 0 or 1.
    """
    from scipy.optimize import minimize  # noqa: PLC0415 - a service that only predicts needs no scipy

    knots, place = np.unique(logit, return_inverse=True)
    count, ones = np.bincount(place).astype(np.float64), np.bincount(place, labels)
    span = np.concatenate([[UPDATE_LIMIT], np.diff(knots)])

    def loss(slopes: Vector) -> tuple[float, Vector]:
        moved = knots + np.cumsum(span * slopes)
        value = (count * np.logaddexp(0, moved) - ones * moved).sum() / len(logit)
        of_moved = (count / (1 + np.exp(-moved)) - ones) / len(logit)
        return float(value), span * np.cumsum(of_moved[::-1])[::-1]

    start = np.zeros(len(knots))
    options: Any = {"maxiter": 5000, "maxfun": 20000, "ftol": 1e-13, "gtol": 1e-9}
    box = [(-1.0, 1.0)] * len(knots)
    result = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=box, options=options)
    found, gradient = loss(result.x)
    to_optimum = float(
        (gradient * result.x + np.abs(gradient)).sum()
    )  # the most that a step in the box gains
    return max(0.0, loss(start)[0] - found + to_optimum)
