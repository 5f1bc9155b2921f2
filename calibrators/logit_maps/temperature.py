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
from boxcal.calibrators.threads import block_rows, over_blocks

LOWEST, HIGHEST = 1e-3, 1e4
ROUNDS = 100
ROUND_SHARE = 0.8
"""What a pass over the data leaves of the progress that is still to come."""
CHUNK = 1 << 20
"""Entries of the logits whose derivatives are added up at once."""


class RowTemperature(LogitMap):
    """A map that divides every row by a temperature of its own, and so keeps the order of the classes."""

    def inverse_temperature(self, scores: Tensor) -> Tensor:
        """Give 1 / temperature, () or (N, 1), for (N, K) logits."""
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
        self._found = 1.0, math.nan, 0

    def inverse_temperature(self, scores: Tensor) -> Tensor:
        """Give the same for every row."""
        del scores
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
        self._found = best_temperature(data, self.tick)
        self._unit = self._found[0]

    def solve(self, data: ValidationSet, seed: int, tick: Callable[[float], None]) -> Solution:
        """Take the temperature that Newton's method has found: the loss is convex in its inverse."""
        del seed, tick
        temperature, slope, rounds = self._found
        ratio = temperature / data.scale
        self._at_edge = not LOWEST * 1.001 < ratio < HIGHEST * 0.999
        self.set_parameters({"temperature": torch.tensor(temperature)})
        return Solution(abs(slope), 1, 1, rounds)


def best_temperature(
    data: ValidationSet, tick: Callable[[float], None] = LogitMap.tick
) -> tuple[float, float, int]:
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
    unit = data.scale
    low, high = 1.0 / (HIGHEST * unit), 1.0 / (LOWEST * unit)
    inverse, slope, rounds = 1.0 / unit, 0.0, 0
    while rounds < ROUNDS:
        slope, curvature = _derivatives(data, inverse, _of_round(tick, rounds))
        rounds += 1
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


def _of_round(tick: Callable[[float], None], rounds: int) -> Callable[[float], None]:
    """Map the progress of one pass onto its share of the whole."""
    left = ROUND_SHARE**rounds
    return lambda share: tick(1.0 - left * (1.0 - share * (1.0 - ROUND_SHARE)))


def _derivatives(data: ValidationSet, inverse: float, tick: Callable[[float], None]) -> tuple[float, float]:
    """First and second derivative of the mean loss in the inverse temperature."""

    def of_rows(rows: slice) -> tuple[Tensor, Tensor]:
        """Of the loss of each row of a block that fits into the processor's cache."""
        z, y = data.logits[rows].double(), data.labels[rows]
        centred = z - z.amax(dim=1, keepdim=True)
        weights = (centred * inverse).exp_()
        total = weights.sum(dim=1)
        weights *= centred
        mean = weights.sum(dim=1) / total
        weights *= centred
        square = weights.sum(dim=1) / total
        slope, curvature = mean - centred.gather(1, y[:, None])[:, 0], square - mean * mean
        if data.weights is None:
            return slope, curvature
        return slope * data.weights[rows], curvature * data.weights[rows]

    def work(chunk: slice) -> tuple[float, float]:
        block = block_rows(data.num_classes)
        starts = range(chunk.start, chunk.stop, block)
        parts = [of_rows(slice(start, min(start + block, chunk.stop))) for start in starts]
        first, second = (torch.cat(column) for column in zip(*parts, strict=True))
        return float(first.sum()), float(second.sum())

    chunk = max(1, CHUNK // data.num_classes)
    slope, curvature = 0.0, 0.0
    for place, (first, second) in enumerate(over_blocks(work, len(data), chunk), 1):
        slope += first
        curvature += second
        tick(min(1.0, place * chunk / len(data)))
    return slope / len(data), curvature / len(data)
