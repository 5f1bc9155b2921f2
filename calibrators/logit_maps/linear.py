"""`vector`, `sms`, `matrix` and `dirichlet`: a temperature, then a linear map regularised to the identity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators import formulas, tensor_ops
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.folds import FOLDS, fold_masks
from boxcal.calibrators.logit_maps.base import LogitMap, Solution
from boxcal.calibrators.logit_maps.temperature import best_temperature
from boxcal.calibrators.parametrised import parameter

Array = np.ndarray[Any, Any]

WORSE = 2
"""The path of strengths ends after so many that are worse than the best."""


class Ridge(NamedTuple):
    """Factors of the squares of `diagonal(W) - 1`, of the other entries of W, and of the offsets."""

    diagonal: float
    others: float
    offsets: float


class LinearMap(LogitMap):
    """`T(g) = W h(g / temperature) + w'`, with a ridge penalty that draws W to the identity and w' to 0.

    `temperature` is that of `ts` on the same data: W = I and w' = 0 is `ts`, and the fit does not depend on
    the scale of the logits. Where there are several strengths of the penalty, five-fold cross-validation
    chooses one. The objective is convex.
    """

    contains_ts = True
    added_later = ("temperature",)
    strengths: ClassVar[tuple[float, ...]] = (1.0,)
    """From the strongest penalty to the weakest."""
    temperature: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.register_buffer("temperature", torch.ones((), dtype=torch.float64))
        self.strength = self.strengths[0]
        self._samples = 1.0

    def reading(self, scores: Tensor) -> Tensor:
        """Give what W takes: h in the formula above."""
        return scores

    def ridge(self, strength: float, samples: float) -> Ridge:
        """Give the factors of the penalty on the mean loss of so many samples."""
        raise NotImplementedError

    def starts(self) -> Sequence[Tensor]:
        """Start at the temperature alone."""
        return [torch.from_numpy(type(self)(self.num_classes).coordinates())]

    def tempered(self, log_temperature: float) -> Sequence[Tensor]:
        """Take over the temperature, with W = I."""
        self.temperature.fill_(np.exp(log_temperature))
        return self.starts()

    def prepare(self, data: ValidationSet) -> None:
        """Fit the temperature."""
        self._samples = data.effective
        self.temperature.fill_(best_temperature(data)[0])

    @property
    def penalty_factors(self) -> Ridge:
        """Give the factors of the penalty at the strength chosen."""
        return self.ridge(self.strength, self._samples)

    def penalty(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Give the penalty at the strength chosen."""
        weight, offsets = parameters.values()
        ridge = self.penalty_factors
        change = weight if weight.ndim == 1 else weight.diagonal()
        others = weight.square().sum() - change.square().sum()
        return (
            ridge.diagonal * (change - 1.0).square().sum()
            + ridge.others * others
            + ridge.offsets * offsets.square().sum()
        )

    def columns(self, scores: Tensor) -> Array:
        """Give what W takes of (N, K) logits, one sample per column."""
        return np.ascontiguousarray(self.reading(scores / self.temperature).numpy().T)

    def solve(self, data: ValidationSet, seed: int, tick: Callable[[float], None]) -> Solution:
        """Choose the strength by cross-validation, then descend on all samples."""
        from boxcal.calibrators.fitting.descent import descend  # noqa: PLC0415 - only fits need scipy
        from boxcal.calibrators.fitting.linear_loss import (  # noqa: PLC0415 - only fits need it
            LinearLoss,
            LinearPart,
        )

        start, evaluations = self.starts()[0].numpy(), 0
        near = start
        shape = tuple(next(self.parameters()).shape)

        def loss(part: ValidationSet) -> LinearLoss:
            return LinearLoss(self.columns(part.scores), part.labels.numpy(), penalised(part), part.weights)

        def penalised(part: ValidationSet) -> LinearPart:
            return LinearPart(shape, self.ridge(self.strength, part.effective))

        if len(self.strengths) > 1 and len(data) >= 2 * FOLDS:
            masks = fold_masks(data, FOLDS, seed)
            sides = [(data.rows(~inside), data.rows(inside)) for inside in masks]
            losses = [(loss(used), loss(unseen)) for used, unseen in sides]
            points, means, paths = [start] * len(masks), list[float](), list[Array]()
            for strength in self.strengths:
                self.strength, total = strength, 0.0
                for fold, (used, unseen) in enumerate(losses):
                    used.part = penalised(sides[fold][0])
                    inside = masks[fold]
                    points[fold], _, count = descend(used, points[fold], None, iterations=50, tolerance=1e-6)
                    evaluations += count
                    share = int(inside.sum()) if data.weights is None else float(data.weights[inside].sum())
                    total += unseen.mean_nll(points[fold]) * share
                means.append(total / len(data))
                paths.append(np.mean(points, axis=0))
                tick(0.8 * len(means) / len(self.strengths))
                if len(means) - 1 - int(np.argmin(means)) >= WORSE:
                    break
            best = int(np.argmin(means))
            self.strength, near = self.strengths[best], paths[best]
        objective = loss(data)
        if objective(near)[0] < objective(start)[0]:
            start = near
        iterations, tolerance = (2000, 1e-15) if self.thorough else (300, 1e-9)
        point, _, count = descend(objective, start, None, iterations=iterations, tolerance=tolerance)
        self.set_coordinates(torch.from_numpy(point))
        return Solution(float(np.abs(objective(point)[1]).max()), 1, 1, evaluations + count)

    def adopt(self, alone: LogitMap) -> None:
        """Take over the strength."""
        if isinstance(alone, LinearMap):
            self.strength = alone.strength

    def edges(self) -> Mapping[str, str]:
        """Say so if the strength chosen is the first or the last of those tried."""
        places = {self.strengths[0]: "strongest", self.strengths[-1]: "weakest"}
        if len(self.strengths) <= 3 or self.strength not in places:
            return {}
        place = places[self.strength]
        return {"strength": f"Cross-validation chose the {place} regularisation tried, {self.strength:g}."}


class VectorScaling(LinearMap):
    """`T(g) = w * g / temperature + w'`, entry by entry (Guo et al. 2017); ridge c K/N on w - 1 and w'.

    Cross-validation chooses c. Where classes differ much, c = 1 costs most of what the method can gain.
    """

    name = "vector"
    strengths = tuple(10.0**power for power in range(2, -5, -1))

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.factors = parameter(torch.ones(num_classes))
        self.offsets = parameter(torch.zeros(num_classes))

    def forward(self, scores: Tensor) -> Tensor:
        """Scale and shift every class of (N, K) logits."""
        mapped: Tensor = formulas.vector_scaling(tensor_ops, self, scores)
        return mapped

    def ridge(self, strength: float, samples: float) -> Ridge:
        """One factor for both."""
        return Ridge(strength * self.num_classes / samples, 0.0, strength * self.num_classes / samples)


class MatrixScaling(LinearMap):
    """`T(g) = W g / temperature + w'` (Guo et al. 2017), regularised as by Kull et al. (2019).

    The penalty is lambda / (K (K - 1)) times the sum of squares off the diagonal, plus lambda / K times
    that of the intercept (their lambda = mu), and K/N times that of `diagonal(W) - 1`, which they leave free:
    with few samples it then grows until classes have the probability 0.
    """

    name = "matrix"
    strengths = tuple(10.0**power for power in range(6, -5, -1))

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.weight = parameter(torch.eye(num_classes))
        self.intercept = parameter(torch.zeros(num_classes))

    def forward(self, scores: Tensor) -> Tensor:
        """Map (N, K) logits."""
        mapped: Tensor = formulas.matrix_scaling(tensor_ops, self, scores)
        return mapped

    def ridge(self, strength: float, samples: float) -> Ridge:
        """Divide the strength among the entries off the diagonal, and among the offsets."""
        K = self.num_classes
        return Ridge(K / samples, strength / (K * (K - 1)), strength / K)


class DirichletCalibration(MatrixScaling):
    """`T(g) = W log softmax(g / temperature) + w'` (Kull et al. 2019), regularised as `matrix`."""

    name = "dirichlet"
    normalises = True

    def forward(self, scores: Tensor) -> Tensor:
        """Map (N, K) logits."""
        mapped: Tensor = formulas.dirichlet(tensor_ops, self, scores)
        return mapped

    def reading(self, scores: Tensor) -> Tensor:
        """Take the log probabilities of (N, K) logits."""
        return scores.log_softmax(dim=1)


class StructuredMatrixScaling(MatrixScaling):
    """`T(g) = W g / temperature + w'` with a penalty for each part of W (Berta et al. 2025).

    The penalty is K/N times the squares of `diagonal(W) - 1` and of w', and c K (K - 1) / N times those off
    the diagonal, c chosen by cross-validation.
    """

    name = "sms"
    strengths = (1.0, 0.1, 0.01)

    def ridge(self, strength: float, samples: float) -> Ridge:
        """Penalise the more entries a part has, the more."""
        K = self.num_classes
        return Ridge(K / samples, strength * K * (K - 1) / samples, K / samples)
