"""`ets`: ensemble temperature scaling, softened, raw and uniform probabilities mixed (Zhang et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from boxcal.calibrators.array_ops import row_sum, softmax
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.parameters import Array, Gradients, Limits, Parameters, Shapes, Values, Vjp
from boxcal.calibrators.maps.temperature import HIGHEST, LOWEST, best_temperature

SMALLEST = 1e-300
"""Probabilities below this count as this in a fit; it keeps logarithms finite."""
LARGEST_RATIO = 80.0
"""Limits the gradient of a part of weight 0: log of its probability over that of the largest other part."""


class EnsembleTemperatureScaling(LogitMap):
    """`T(g) = log(w1 softmax(g / temperature) + w2 softmax(g) + w3 / K)`, weights on the simplex."""

    name = "ets"
    stacked = "always"
    shapes: ClassVar[Shapes] = {"temperature": (), "mixture_weights": (3,)}
    positive = ("temperature",)
    combines = True
    contains_ts = True
    normalises = True
    mixes_labels = True

    def __init__(self, num_classes: int, parameters: Mapping[str, Any] | None = None) -> None:
        super().__init__(num_classes, parameters)
        self._unit = 1.0

    def fresh(self) -> dict[str, Any]:
        """Mix nothing into the raw probabilities."""
        return {"temperature": 1.0, "mixture_weights": [0.0, 1.0, 0.0]}

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Mix three distributions over (N, K) logits and return the log, exactly however small it is."""
        uniform = ops.full_like(scores, -math.log(scores.shape[1]))
        logs = [ops.log_softmax(scores / p["temperature"]), ops.log_softmax(scores), uniform]
        parts, weights = ops.stack(logs), p["mixture_weights"][:, None, None]
        anchor = ops.amax(ops.where(weights <= 0.0, -math.inf, ops.constant(parts)), 0)
        mixture = (weights * ops.exp(ops.clip(parts - anchor, None, LARGEST_RATIO))).sum(0)
        return anchor + ops.log(mixture)

    def precompute(self, scores: Array) -> Array:
        """Compute the raw probabilities once."""
        return softmax(scores)

    def vjp(self, p: Parameters, scores: Array, precomputed: Any = None) -> tuple[Array, Vjp]:
        """Mix: with m the mixture, q softened and r raw probabilities, d log m = (w1 dq + w2 dr + dw) / m.

        dq_k = q_k (d(g_k / T) - sum_j q_j d(g_j / T)).
        """
        inverse, weights = 1.0 / p["temperature"], p["mixture_weights"]
        raw = softmax(scores) if precomputed is None else precomputed
        softened = softmax(scores * inverse)
        mixture = np.maximum(weights[0] * softened + weights[1] * raw, SMALLEST) + weights[2] / raw.shape[1]

        def back(by_mapped: Array, through: bool) -> tuple[Gradients, Array | None]:
            by_mixture = by_mapped / mixture
            parts = by_mixture * softened
            total = row_sum(parts)
            # Through g / temperature: w1 q (u - q.u), u the derivative in the mixture.
            by_scaled = weights[0] * (parts - softened * total)
            by_weights = [total.sum(), np.vdot(by_mixture, raw), by_mixture.sum() / raw.shape[1]]
            gradients = {
                "temperature": -inverse * inverse * np.vdot(by_scaled, scores),
                "mixture_weights": np.array(by_weights),
            }
            if not through:
                return gradients, None
            others = by_mixture * raw
            by_raw = weights[1] * (others - raw * row_sum(others))
            return gradients, by_scaled * inverse + by_raw

        return np.log(mixture), back

    def of_labels(
        self, p: Parameters, softened: Array, by_inverse: Array, raw: Array
    ) -> tuple[Array, Callable[[Array], Gradients]]:
        """Give the loss of every row (N,) by the probabilities of its label alone, and the way back.

        `softened`, `raw`: (N,). `by_inverse`: (N,), derivatives of -log softened in 1 / temperature.
        """
        inverse, weights = 1.0 / p["temperature"], p["mixture_weights"]
        uniform = 1.0 / self.num_classes
        mixture = np.maximum(weights[0] * softened + weights[1] * raw, SMALLEST) + weights[2] * uniform

        def back(by_losses: Array) -> Gradients:
            by_mixture = -by_losses / mixture
            slope = inverse * inverse * weights[0] * (by_mixture * softened) @ by_inverse
            shares = [by_mixture @ softened, by_mixture @ raw, by_mixture.sum() * uniform]
            return {"temperature": slope, "mixture_weights": np.array(shares)}

        return -np.log(mixture), back

    def at(self, coordinates: Array) -> dict[str, Array]:
        """Read the log of the temperature and three masses, of which only the shares matter."""
        masses = coordinates[1:]
        with np.errstate(invalid="ignore"):
            return {"temperature": np.exp(coordinates[0]), "mixture_weights": masses / masses.sum()}

    def slopes(self, coordinates: Array, gradients: Mapping[str, Array]) -> Array:
        """Carry derivatives in the shares on to the masses."""
        masses, by_shares = coordinates[1:], gradients["mixture_weights"]
        by_masses = (by_shares - by_shares @ masses / masses.sum()) / masses.sum()
        return np.concatenate([[np.exp(coordinates[0]) * gradients["temperature"]], by_masses])

    def coordinates(self) -> Array:
        """Give the log of the temperature and the shares."""
        temperature = self.parameters["temperature"].reshape(1)
        return np.concatenate([np.log(temperature), self.parameters["mixture_weights"]])

    def starts(self) -> Sequence[Array]:
        """Mix some of each, at temperatures on both sides of that of `ts`."""
        return [
            np.array([math.log(temperature * self._unit), *weights])
            for temperature in (2.0, 1.2, 0.7, 4.0)
            for weights in ((0.8, 0.15, 0.05), (0.3, 0.65, 0.05), (0.97, 0.02, 0.01), (0.5, 0.2, 0.3))
        ]

    def tempered(self, log_temperature: float) -> Sequence[Array]:
        """Mix nothing in."""
        return [np.array([log_temperature, 1.0, 0.0, 0.0])]

    def limits(self) -> Limits:
        """Temperatures around that of `ts`; masses of 0 to 1."""
        return [(math.log(LOWEST * self._unit), math.log(HIGHEST * self._unit)), *[(0.0, 1.0)] * 3]

    def prepare(self, data: ValidationSet, tick: Callable[[float], None] = lambda fraction: None) -> None:
        """Find the temperature of `ts`."""
        self._unit = best_temperature(data, tick)[0]

    def invalid_reason(self) -> str | None:
        """Say so if the temperature is not positive, or the weights do not add up to 1."""
        weights = self.parameters["mixture_weights"]
        if weights.min() < 0.0 or not math.isclose(weights.sum(), 1.0, abs_tol=1e-9):
            return f"the mixture weights must be non-negative and sum to 1; they are {weights.tolist()}"
        return super().invalid_reason()
