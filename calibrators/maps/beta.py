"""`beta`: beta calibration of each class against the rest (Kull et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from boxcal.calibrators import array_ops
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.parameters import Array, Gradients, Parameters, Shapes, Solution, Values, Vjp

FLOOR, LEAST_REST = -690.0, 1e-16
"""Of log p and of 1 - p: far below what a float's rounding can tell from 0."""
RIDGE = 1e-6
"""Of a and b, beside the sum of the losses: where a class is separated, it is all that ends the fit."""
MOST_STEPS, MOST_HALVINGS = 100, 30
DECREASE = 1e-12
"""Nats a sample that a step must promise, else the fit ends."""


class BetaCalibration(LogitMap):
    """`T(g)_k = log sigmoid(a_k log p_k - b_k log(1 - p_k) + c_k)` with p = softmax(g) and a, b >= 0."""

    name = "beta"
    stacked = "of two classes"
    shapes: ClassVar[Shapes] = {"log_weights": ("K",), "complement_weights": ("K",), "offsets": ("K",)}

    def fresh(self) -> dict[str, Any]:
        ones, zeros = np.ones(self.num_classes), np.zeros(self.num_classes)
        return {"log_weights": ones, "complement_weights": ones, "offsets": zeros}

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Map (N, K) logits, class by class."""
        inside, outside = logs_of_both(ops, scores)
        return ops.log_sigmoid(p["log_weights"] * inside - p["complement_weights"] * outside + p["offsets"])

    def vjp(self, p: Parameters, scores: Array, precomputed: Any = None) -> tuple[Array, Vjp]:
        """With u = a log p - b log(1 - p) + c: dT = sigmoid(-u) du, du/d log p = a + b p / (1 - p)."""
        inside, outside = logs_of_both(array_ops, scores)
        first, second = p["log_weights"], p["complement_weights"]
        values = first * inside - second * outside + p["offsets"]

        def back(by_mapped: Array, through: bool) -> tuple[Gradients, Array | None]:
            by_values = by_mapped * array_ops.sigmoid(-values)
            gradients = {
                "log_weights": (by_values * inside).sum(axis=0),
                "complement_weights": -(by_values * outside).sum(axis=0),
                "offsets": by_values.sum(axis=0),
            }
            if not through:
                return gradients, None
            # Where log p or 1 - p is floored, nothing moves.
            odds = np.where(outside > np.log(LEAST_REST), np.exp(inside - outside), 0.0)
            by_log_p = by_values * (np.where(inside > FLOOR, first, 0.0) + second * odds)
            return gradients, by_log_p - array_ops.softmax(scores) * array_ops.row_sum(by_log_p)

        return array_ops.log_sigmoid(values), back

    def solve(self, data: ValidationSet, tick: Callable[[float], None]) -> Solution:
        """Fit a logistic regression with a, b >= 0 per class."""
        inside, outside = logs_of_both(array_ops, data.scores)
        y, ones = data.labels, np.ones(len(data.labels))
        weights = ones if data.weights is None else data.weights
        fitted = np.zeros((3, self.num_classes))
        for k in range(self.num_classes):
            hits = y == k
            if hits.any() and not hits.all():
                fitted[:, k] = _log_odds(
                    np.stack([inside[:, k], -outside[:, k], ones], axis=1), hits, weights
                )
            else:
                fitted[2, k] = 40.0 if hits.all() else -np.log(len(y) * self.num_classes)
            tick((k + 1) / self.num_classes)
        self.parameters = dict(zip(self.shapes, fitted, strict=True))
        return Solution(float("nan"), 1, 1, self.num_classes)


def _log_odds(readings: Array, hits: Array, weights: Array) -> Array:
    """Return a, b >= 0 and c of log odds `readings @ (a, b, c)`, by Newton's method."""
    signs, ridge = np.where(hits, 1.0, -1.0), np.array([RIDGE, RIDGE, 0.0])

    def loss(point: Array) -> float:
        return float(0.5 * ridge @ point**2 - weights @ array_ops.log_sigmoid(signs * (readings @ point)))

    point = np.zeros(3)  # where no sample is too sure for a curvature
    value = loss(point)
    for _ in range(MOST_STEPS):
        wrong = array_ops.sigmoid(-signs * (readings @ point))
        gradient = ridge * point - readings.T @ (weights * signs * wrong)
        free = (point > 0.0) | (gradient < 0.0) | (ridge == 0.0)
        curvature = (readings.T * (weights * wrong * (1.0 - wrong))) @ readings + np.diag(ridge)
        step = np.zeros(3)
        step[free] = np.linalg.lstsq(curvature[np.ix_(free, free)], gradient[free], rcond=None)[0]
        if gradient @ step <= DECREASE * weights.sum():
            break
        for halving in range(MOST_HALVINGS):
            tried = point - 0.5**halving * step
            tried[:2] = np.maximum(tried[:2], 0.0)
            if (reached := loss(tried)) < value:
                point, value = tried, reached
                break
        else:
            break
    return point


def logs_of_both(ops: ModuleType, scores: Values) -> tuple[Values, Values]:
    """Log p and log(1 - p) of every class, floored far below what a float's rounding can tell from 0."""
    log_p = ops.log_softmax(scores)
    half = ops.tanh(0.5 * log_p)
    complement = -2.0 * half / (1.0 - half)  # -expm1(log_p), which ONNX does not have
    return ops.clip(log_p, FLOOR, None), ops.log(ops.clip(complement, LEAST_REST, None))
