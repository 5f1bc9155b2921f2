"""What `matrix` and `dirichlet` share: an affine map, drawn towards a diagonal one by regularisation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.logit_maps.base import LogitMap, Solution
from boxcal.calibrators.parametrised import parameter

STRENGTHS = (1e4, 1e3, 1e2, 1e1, 1.0)
"""Regularisation that is tried, from nearly diagonal to nearly free; the paper's lambda = mu."""
JUDGED = 5000
"""How many samples at most judge the strength, those held out included."""
HELD_OUT = 5
"""One in so many samples judges the strength."""


class RegularisedLinear(LogitMap):
    """`T(g) = W h(g) + w'` with off-diagonal and intercept regularisation (Kull et al. 2019).

    The penalty is lambda / (K (K - 1)) times the sum of squares off the diagonal, plus lambda / K times
    that of the intercept. Lambda is the strongest within one standard error of the best on held-out
    samples.
    """

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.weight = parameter(torch.eye(num_classes))
        self.intercept = parameter(torch.zeros(num_classes))
        self.strength = STRENGTHS[0]

    def reading(self, scores: Tensor) -> Tensor:
        """Give what the affine map takes: h in the formula above."""
        return scores

    def forward(self, scores: Tensor) -> Tensor:
        """Map (N, K) logits affinely."""
        return self.reading(scores) @ self.weight.T + self.intercept

    def starts(self) -> Sequence[Tensor]:
        """Start at the identity: the objective is convex."""
        return [
            torch.cat(
                [torch.eye(self.num_classes, dtype=torch.float64).flatten(), torch.zeros(self.num_classes)]
            )
        ]

    def penalty(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Squares off the diagonal and of the intercept, per entry."""
        K = self.num_classes
        weight, intercept = parameters["weight"], parameters["intercept"]
        off = weight.square().sum() - weight.diagonal().square().sum()
        return self.strength * (off / (K * (K - 1)) + intercept.square().sum() / K)

    def solve(self, data: ValidationSet, seed: int, tick: Callable[[float], None]) -> Solution:
        """Follow the path of strengths on most samples, judge on the others, then fit to all."""
        from boxcal.calibrators.fitting.descent import descend  # noqa: PLC0415 - only fits need scipy
        from boxcal.calibrators.fitting.joint import JointObjective  # noqa: PLC0415 - and numba

        read = self.reading(data.scores)
        order = torch.from_numpy(np.random.default_rng(seed).permutation(len(data))[:JUDGED])
        held, used = order[::HELD_OUT], order[np.arange(len(order)) % HELD_OUT > 0]
        if len(used) < HELD_OUT:
            held = used = order
        objective = JointObjective(_Affine(self), None, read[used], data.labels[used])
        point, evaluations = self.starts()[0].numpy(), 0
        ends, judged = [], []
        for index, strength in enumerate(STRENGTHS):
            self.strength = strength
            point, _, count = descend(objective, point, None, iterations=40, tolerance=1e-6)
            evaluations += count
            self.set_coordinates(torch.from_numpy(point))
            with torch.no_grad():
                mapped = read[held] @ self.weight.T + self.intercept
                judged.append(torch.nn.functional.cross_entropy(mapped, data.labels[held], reduction="none"))
            ends.append(point)
            tick(0.6 * (index + 1) / len(STRENGTHS))
        best = min(judged, key=lambda losses: losses.mean().item())
        chosen = next(
            index
            for index, losses in enumerate(judged)
            if (losses - best).mean() <= (losses - best).std(correction=0) / math.sqrt(len(best))
        )
        self.strength = STRENGTHS[chosen]
        objective = JointObjective(_Affine(self), None, read, data.labels)
        point, _, count = descend(objective, ends[chosen], None, iterations=300, tolerance=1e-9)
        self.set_coordinates(torch.from_numpy(point))
        return Solution(float(np.abs(objective(point)[1]).max()), 1, 1, evaluations + count)


class _Affine(LogitMap):
    """The affine part alone, applied to what was read once; its parameters are the whole map's."""

    def __init__(self, whole: RegularisedLinear) -> None:
        super().__init__(whole.num_classes)
        self.weight, self.intercept = whole.weight, whole.intercept
        self._penalty = whole.penalty

    def forward(self, scores: Tensor) -> Tensor:
        return scores @ self.weight.T + self.intercept

    def penalty(self, parameters: Mapping[str, Tensor]) -> Tensor | None:
        return self._penalty(parameters)
