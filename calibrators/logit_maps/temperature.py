"""`ts`: temperature scaling, the logits divided by one number (Guo et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators import formulas, tensor_ops
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.logit_maps.base import LogitMap, Solution
from boxcal.calibrators.parametrised import Limits, parameter, vector

LOWEST, HIGHEST = 1e-3, 1e4
ROUNDS = 100
CHUNK = 1 << 20
"""Entries of the logits worked on at once."""


class RowTemperature(LogitMap):
    """A map that divides every row by a temperature of its own, and so keeps the order of the classes."""

    def inverse_temperature(self, top: Tensor) -> Tensor:
        """Give 1 / temperature, () or (N, 1), for the ten largest logits of each row in descending order."""
        raise NotImplementedError

    def forward(self, scores: Tensor) -> Tensor:
        """Divide (N, K) logits by the temperature."""
        return scores * self.inverse_temperature(scores)


class TemperatureScaling(RowTemperature):
    """`T(g) = g / temperature`: above 1 it softens overconfident predictions, below 1 it sharpens them."""

    name = "ts"
    positive = ("temperature",)

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.temperature = parameter(1.0)
        self._unit, self._at_edge = 1.0, False

    def inverse_temperature(self, top: Tensor) -> Tensor:
        """Give the same for every row."""
        del top
        return 1.0 / self.temperature

    def forward(self, scores: Tensor) -> Tensor:
        """Divide (N, K) logits by the temperature."""
        mapped: Tensor = formulas.temperature_scaling(tensor_ops, self, scores)
        return mapped

    def parameters_from(self, coordinates: Tensor) -> dict[str, Tensor]:
        """Read the one coordinate, the log of the temperature."""
        return {"temperature": coordinates[0].exp()}

    def coordinates(self) -> np.ndarray[Any, Any]:
        """Give the log of the temperature."""
        return np.array([math.log(self.temperature.item())])

    def starts(self) -> Sequence[Tensor]:
        """Sharper than the temperature of `ts`, where joint fits with bounds often end."""
        return [vector(math.log(self._unit / divisor)) for divisor in (1.5, 2.5)]

    def limits(self) -> Limits:
        """Limit it to 0.001 to 10,000 times the best temperature."""
        return [(math.log(LOWEST * self._unit), math.log(HIGHEST * self._unit))]

    def edges(self) -> Mapping[str, str]:
        """Say so if the temperature of `ts` is the lowest or the highest that is tried."""
        value, at_edge = self.temperature.item(), self._at_edge
        return (
            {"temperature": f"The temperature ended at the edge of its range, {value:g}."} if at_edge else {}
        )

    def prepare(self, data: ValidationSet) -> None:
        """Find the best temperature, around which joint fits look."""
        self._unit = best_temperature(data.scores, data.labels)[0]

    def solve(self, data: ValidationSet, seed: int, tick: Callable[[float], None]) -> Solution:
        """Find the temperature by Newton's method: the loss is convex in its inverse."""
        del seed, tick
        temperature, slope, rounds = best_temperature(data.scores, data.labels)
        ratio = temperature / scale_of(data.scores)
        self._at_edge = not LOWEST * 1.001 < ratio < HIGHEST * 0.999
        self.set_parameters({"temperature": torch.tensor(temperature)})
        return Solution(abs(slope), 1, 1, rounds)


def scale_of(scores: Tensor) -> float:
    """Mean distance of the largest logit to the mean of its row; 1 where all logits of all rows are equal."""
    return float((scores.amax(dim=1) - scores.mean(dim=1)).mean()) or 1.0


def best_temperature(scores: Tensor, labels: Tensor) -> tuple[float, float, int]:
    """Find the temperature of least NLL by Newton's method in float64, inside a bracket.

    The loss is convex in the inverse temperature t, with derivative E[z] - z_y and second derivative Var[z]
    under softmax(t z), averaged over the samples.

    Returns
    -------
    temperature : float
        Between 0.001 and 10,000 times the scale of the logits.
    slope : float
        What remains of the derivative of the mean loss in the log of the temperature.
    rounds : int
        Passes over the data.
    """
    unit = scale_of(scores)
    low, high = 1.0 / (HIGHEST * unit), 1.0 / (LOWEST * unit)
    inverse, slope, rounds = 1.0 / unit, 0.0, 0
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
