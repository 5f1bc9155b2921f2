"""`beta`: beta calibration of each class against the rest (Kull et al. 2017), by scikit-learn."""

from __future__ import annotations

import warnings
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
        """Fit a logistic regression per class; one whose weight is negative is fitted again without."""
        from scipy.linalg import LinAlgWarning  # noqa: PLC0415 - only fits need it
        from sklearn.exceptions import ConvergenceWarning  # noqa: PLC0415 - as above
        from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 - as above

        inside, outside = logs_of_both(array_ops, data.scores)
        y = data.labels
        fitted = np.zeros((3, self.num_classes))
        for k in range(self.num_classes):
            hits = y == k
            if hits.any() and not hits.all():
                readings = np.stack([inside[:, k], -outside[:, k]], axis=1)
                used = [0, 1]
                for _ in range(2):
                    model = LogisticRegression(C=1e6, solver="newton-cholesky")
                    with warnings.catch_warnings():  # where Newton's method fails, it goes on with L-BFGS
                        warnings.simplefilter("ignore", ConvergenceWarning)
                        warnings.simplefilter("ignore", LinAlgWarning)
                        model.fit(readings[:, used], hits, sample_weight=data.weights)
                    weights = dict(zip(used, model.coef_[0], strict=True))
                    used = [column for column, weight in weights.items() if weight >= 0.0] or [0]
                    if len(used) == len(weights):
                        break
                for column, weight in weights.items():
                    fitted[column, k] = max(weight, 0.0)
                fitted[2, k] = model.intercept_[0]
            else:
                fitted[2, k] = 40.0 if hits.all() else -np.log(len(y) * self.num_classes)
            tick((k + 1) / self.num_classes)
        self.parameters = dict(zip(self.shapes, fitted, strict=True))
        return Solution(float("nan"), 1, 1, self.num_classes)


def logs_of_both(ops: ModuleType, scores: Values) -> tuple[Values, Values]:
    """Log p and log(1 - p) of every class, floored far below what a float's rounding can tell from 0."""
    log_p = ops.log_softmax(scores)
    half = ops.tanh(0.5 * log_p)
    complement = -2.0 * half / (1.0 - half)  # -expm1(log_p), which ONNX does not have
    return ops.clip(log_p, FLOOR, None), ops.log(ops.clip(complement, LEAST_REST, None))
