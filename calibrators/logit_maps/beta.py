"""`beta`: beta calibration of each class against the rest (Kull et al. 2017), by scikit-learn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators import formulas, tensor_ops
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.logit_maps.base import LogitMap, Solution
from boxcal.calibrators.parametrised import parameter


class BetaCalibration(LogitMap):
    """`T(g)_k = log sigmoid(a_k log p_k - b_k log(1 - p_k) + c_k)` with p = softmax(g) and a, b >= 0."""

    name = "beta"
    combines = False

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.log_weights = parameter(torch.ones(num_classes))
        self.complement_weights = parameter(torch.ones(num_classes))
        self.offsets = parameter(torch.zeros(num_classes))

    def forward(self, scores: Tensor) -> Tensor:
        """Map (N, K) logits, class by class."""
        mapped: Tensor = formulas.beta(tensor_ops, self, scores)
        return mapped

    def starts(self) -> Sequence[Tensor]:
        """There is nothing to descend over."""
        return []

    def solve(self, data: ValidationSet, seed: int, tick: Callable[[float], None]) -> Solution:
        """Fit a logistic regression per class; one whose weight is negative is fitted again without."""
        from sklearn.exceptions import ConvergenceWarning  # noqa: PLC0415 - only fits need it
        from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

        del seed
        inside, outside = (part.numpy() for part in formulas.logs_of_both(tensor_ops, data.scores))
        y = data.labels.numpy()
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
                        model.fit(readings[:, used], hits, sample_weight=data.row_weights)
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
        names = ("log_weights", "complement_weights", "offsets")
        self.set_parameters({name: torch.from_numpy(row) for name, row in zip(names, fitted, strict=True)})
        return Solution(float("nan"), 1, 1, self.num_classes)
