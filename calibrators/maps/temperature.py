"""`ts`: temperature scaling, the logits divided by one number (Guo et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from boxcal.calibrators.array_ops import row_max, row_sum
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.maps.base import LogitMap, RowTemperature
from boxcal.calibrators.maps.parameters import (
    Array,
    Gradients,
    Limits,
    Parameters,
    Shapes,
    Solution,
    Values,
    Vjp,
)
from boxcal.calibrators.threads import block_rows, over_blocks

LOWEST, HIGHEST = 1e-3, 1e4
ROUNDS = 100
ROUND_SHARE = 0.8
"""What a pass over the data leaves of the progress that is still to come."""
CHUNK = 1 << 20
"""Entries of the logits whose derivatives are added up at once."""
MANY, SOME = 1 << 23, 1 << 19
"""Entries from which on Newton's method begins at the temperature of some rows, and those of these."""


class TemperatureScaling(RowTemperature):
    """`T(g) = g / temperature`: above 1 it softens overconfident predictions, below 1 it sharpens them."""

    name = "ts"
    stacked = "always"
    shapes: ClassVar[Shapes] = {"temperature": ()}
    positive = ("temperature",)
    combines = True

    def __init__(self, num_classes: int, parameters: Mapping[str, Any] | None = None) -> None:
        super().__init__(num_classes, parameters)
        self._unit, self._at_edge = 1.0, False
        self._found = 1.0, math.nan, 0

    def fresh(self) -> dict[str, Any]:
        return {"temperature": 1.0}

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Divide (N, K) logits by the temperature."""
        del ops
        return scores / p["temperature"]

    def inverse(self, p: Parameters, reading: Array) -> tuple[Array, Vjp]:
        """Give the same for every row; with r = 1 / T, dr / dT = -r^2."""
        inverse = 1.0 / p["temperature"]

        def back(by_inverse: Array) -> tuple[Gradients, None]:
            return {"temperature": -inverse * inverse * by_inverse.sum()}, None

        return inverse * np.ones(reading.shape[1]), back

    def at(self, coordinates: Array) -> dict[str, Array]:
        """Read the one coordinate, the log of the temperature."""
        return {"temperature": np.exp(coordinates[0])}

    def slopes(self, coordinates: Array, gradients: Mapping[str, Array]) -> Array:
        return np.array([np.exp(coordinates[0]) * gradients["temperature"]])

    def coordinates(self) -> Array:
        """Give the log of the temperature."""
        return np.log(self.parameters["temperature"].reshape(1))

    def starts(self) -> Sequence[Array]:
        """Sharper than the temperature of `ts`, where joint fits with bounds often end."""
        return [np.array([math.log(self._unit / divisor)]) for divisor in (1.5, 2.5)]

    def limits(self) -> Limits:
        """Limit it to 0.001 to 10,000 times the best temperature."""
        return [(math.log(LOWEST * self._unit), math.log(HIGHEST * self._unit))]

    def edges(self) -> Mapping[str, str]:
        """Say so if the temperature of `ts` is the lowest or the highest that is tried."""
        value = self.parameters["temperature"].item()
        edge = {"temperature": f"The temperature ended at the edge of its range, {value:g}."}
        return edge if self._at_edge else {}

    def prepare(self, data: ValidationSet, tick: Callable[[float], None] = lambda fraction: None) -> None:
        """Find the best temperature, around which joint fits look."""
        self._found = best_temperature(data, tick)
        self._unit = self._found[0]

    def solve(self, data: ValidationSet, tick: Callable[[float], None]) -> Solution:
        """Take the temperature that Newton's method has found: the loss is convex in its inverse."""
        del tick
        temperature, slope, rounds = self._found
        ratio = temperature / data.scale
        self._at_edge = not LOWEST * 1.001 < ratio < HIGHEST * 0.999
        self.parameters = {"temperature": np.array(temperature)}
        return Solution(abs(slope), 1, 1, rounds)


class TemperedMap(LogitMap):
    """A map of x = g / temperature, whose temperature is that of `ts` on the same data and is not searched.

    The fit then does not depend on the scale of the logits, and the fresh map is `ts`.
    """

    contains_ts = True
    prepared: ClassVar[tuple[str, ...]] = ("temperature",)

    def __init__(self, num_classes: int, parameters: Mapping[str, Any] | None = None) -> None:
        super().__init__(num_classes, parameters)
        self.samples = 1.0

    def precompute(self, scores: Array) -> Array:
        """Divide by the temperature."""
        read: Array = scores / self.parameters["temperature"]
        return read

    def starts(self) -> Sequence[Array]:
        return [type(self)(self.num_classes).coordinates()]

    def tempered(self, log_temperature: float) -> Sequence[Array]:
        """Take over the temperature, with the rest as it is fresh."""
        self.parameters["temperature"] = np.exp(np.array(log_temperature))
        return self.starts()

    def prepare(self, data: ValidationSet, tick: Callable[[float], None] = lambda fraction: None) -> None:
        """Fit the temperature; where no predicted label is wrong, nothing limits it, and it stays 1."""
        self.samples = data.effective
        if data.shows_errors:
            self.parameters["temperature"] = np.array(best_temperature(data, tick)[0])


def best_temperature(
    data: ValidationSet, tick: Callable[[float], None] = lambda fraction: None
) -> tuple[float, float, int]:
    """Find the temperature of least NLL by Newton's method in float64, inside a bracket.

    The loss is convex in the inverse temperature t, with derivative E[z] - z_y and second derivative Var[z]
    under softmax(t z), averaged over the samples.

    Returns `temperature`: between 0.001 and 10,000 times the scale of the logits; `slope`: what remains of
    the derivative of the mean loss in the log of the temperature; `rounds`: passes over the data.
    """
    unit = data.scale
    low, high = 1.0 / (HIGHEST * unit), 1.0 / (LOWEST * unit)
    inverse, slope, rounds = 1.0 / unit, 0.0, 0
    if data.logits.size >= MANY:
        some = data.rows(np.arange(0, len(data), data.logits.size // SOME))
        if some.shows_errors:
            inverse = 1.0 / best_temperature(some)[0]
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
    logits, labels, row_weights = data.logits, data.labels, data.weights

    def of_rows(rows: slice) -> tuple[Array, Array]:
        """Of the loss of each row of a block that fits into the processor's cache."""
        z, y = logits[rows].astype(np.float64), labels[rows]
        z -= row_max(z)
        weights = np.exp(z * inverse)
        total = row_sum(weights)[:, 0]
        weights *= z
        mean = row_sum(weights)[:, 0] / total
        weights *= z
        slope = mean - z[np.arange(len(y)), y]
        curvature = row_sum(weights)[:, 0] / total - mean * mean
        if row_weights is None:
            return slope, curvature
        return slope * row_weights[rows], curvature * row_weights[rows]

    def work(chunk: slice) -> tuple[float, float]:
        block = block_rows(logits.shape[1])
        starts = range(chunk.start, chunk.stop, block)
        parts = [of_rows(slice(start, min(start + block, chunk.stop))) for start in starts]
        first, second = (np.concatenate(column) for column in zip(*parts, strict=True))
        return float(first.sum()), float(second.sum())

    chunk = max(1, CHUNK // logits.shape[1])
    slope, curvature = 0.0, 0.0
    for place, (first, second) in enumerate(over_blocks(work, len(labels), chunk), 1):
        slope += first
        curvature += second
        tick(min(1.0, place * chunk / len(labels)))
    return slope / len(labels), curvature / len(labels)
