"""`ts`: temperature scaling, the logits divided by one number (Guo et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.logit_maps.base import LogitMap, Solution
from boxcal.calibrators.parametrised import Limits, parameter, vector

LOWEST, HIGHEST = 1e-3, 1e4
ROUNDS = 100
CHUNK = 1 << 20
"""Entries of the logits worked on at once."""


class TemperatureScaling(LogitMap):
    """`T(g) = g / temperature`: above 1 it softens overconfident predictions, below 1 it sharpens them."""

    name = "ts"

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.temperature = parameter(1.0)

    def forward(self, scores: Tensor) -> Tensor:
        """Divide (N, K) logits by the temperature."""
        return scores / self.temperature

    def parameters_from(self, coordinates: Tensor) -> dict[str, Tensor]:
        """Read the one coordinate, the log of the temperature."""
        return {"temperature": coordinates[0].exp()}

    def coordinates(self) -> np.ndarray[Any, Any]:
        """Give the log of the temperature."""
        return np.array([math.log(self.temperature.item())])

    def starts(self) -> Sequence[Tensor]:
        """No change, and twice as soft."""
        return [vector(0.0), vector(math.log(2.0))]

    def limits(self) -> Limits:
        """Temperatures of 0.001 to 10,000; the certificate says where the data would have one beyond."""
        return [(math.log(LOWEST), math.log(HIGHEST))]

    def invalid_reason(self) -> str | None:
        """Say so if the temperature is not positive."""
        value = self.temperature.item()
        return None if value > 0.0 else f"the temperature {value} is not positive"

    def solve(self, data: ValidationSet, seed: int, tick: Callable[[float], None]) -> Solution:
        """Find the temperature by Newton's method: the loss is convex in its inverse."""
        del seed, tick
        temperature, slope, rounds = best_temperature(data.scores, data.labels)
        self.set_parameters({"temperature": torch.tensor(temperature)})
        return Solution(abs(slope), 1, 1, rounds)


def best_temperature(scores: Tensor, labels: Tensor) -> tuple[float, float, int]:
    """Find the temperature of least NLL by Newton's method in float64, inside a bracket.

    The loss is convex in the inverse temperature t, with derivative E[z] - z_y and second derivative Var[z]
    under softmax(t z), averaged over the samples.

    Returns
    -------
    temperature : float
        Between 0.001 and 10,000; at either end where the data would have it beyond.
    slope : float
        What remains of the derivative of the mean loss in the log of the temperature.
    rounds : int
        Passes over the data.
    """
    low, high = 1.0 / HIGHEST, 1.0 / LOWEST
    inverse, slope, rounds = 1.0, 0.0, 0
    while rounds < ROUNDS:
        rounds += 1
        slope, curvature = _derivatives(scores, labels, inverse)
        if slope > 0.0:
            high = inverse
        else:
            low = inverse
        if abs(slope) * inverse < 1e-14:
            break
        step = inverse - slope / curvature if curvature > 0.0 else -1.0
        if not low < step < high:
            step = (low * high) ** 0.5
        if abs(step - inverse) <= 1e-15 * inverse:
            break
        inverse = step
    return 1.0 / inverse, -slope * inverse, rounds


def _derivatives(scores: Tensor, labels: Tensor, inverse: float) -> tuple[float, float]:
    """First and second derivative of the mean loss in the inverse temperature, in chunks of rows."""
    rows = max(1, CHUNK // scores.shape[1])
    slope, curvature = 0.0, 0.0
    for z, y in zip(torch.split(scores, rows), torch.split(labels, rows), strict=True):
        centred = z - z.amax(dim=1, keepdim=True)
        weights = (centred * inverse).exp_()
        total = weights.sum(dim=1)
        weights *= centred
        mean = weights.sum(dim=1) / total
        weights *= centred
        square = weights.sum(dim=1) / total
        slope += float((mean - centred.gather(1, y[:, None])[:, 0]).sum())
        curvature += float((square - mean * mean).sum())
    return slope / len(labels), curvature / len(labels)
