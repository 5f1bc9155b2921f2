"""`quadratic`: the logits and their squares; for two classes, logistic regression on log odds and square."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.parameters import Array, Gradients, Parameters, Shapes, Values, Vjp
from boxcal.calibrators.maps.temperature import best_temperature


class QuadraticScaling(LogitMap):
    """`T(g) = w x + v * x^2 + w'` with x = g / temperature, v and w' of each class's own (Berta et al. 2025).

    `temperature` is that of `ts` on the same data, so the fit does not depend on the scale of the logits. A
    ridge of half a sample on w - 1, v and w' keeps a fit of few samples finite. The objective is convex.
    """

    name = "quadratic"
    stacked = "of two classes"
    contains_ts = True
    prepared = ("temperature",)
    shapes: ClassVar[Shapes] = {"temperature": (), "factor": (), "squares": ("K",), "offsets": ("K",)}

    def __init__(self, num_classes: int, parameters: Mapping[str, Any] | None = None) -> None:
        super().__init__(num_classes, parameters)
        self._ridge = 0.0

    def fresh(self) -> dict[str, Any]:
        """Begin with the factor 1, and 0 for the rest."""
        none = np.zeros(self.num_classes)
        return {"temperature": 1.0, "factor": 1.0, "squares": none, "offsets": none}

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Map (N, K) logits, entry by entry."""
        del ops
        x = scores / p["temperature"]
        return x * p["factor"] + x * x * p["squares"] + p["offsets"]

    def precompute(self, scores: Array) -> Array:
        """Divide by the temperature, which is not searched."""
        read: Array = scores / self.parameters["temperature"]
        return read

    def vjp(self, p: Parameters, scores: Array, precomputed: Any = None) -> tuple[Array, Vjp]:
        """Map: dT = x dw + x^2 dv + dw' + (w + 2 v x) dx."""
        x = self.precompute(scores) if precomputed is None else precomputed
        squares = x * x

        def back(by_mapped: Array, through: bool) -> tuple[Gradients, Array | None]:
            gradients = {
                "factor": np.vdot(by_mapped, x),
                "squares": (by_mapped * squares).sum(axis=0),
                "offsets": by_mapped.sum(axis=0),
            }
            if not through:
                return gradients, None
            return gradients, by_mapped * (p["factor"] + 2.0 * p["squares"] * x) / self.parameters[
                "temperature"
            ]

        return x * p["factor"] + squares * p["squares"] + p["offsets"], back

    def penalty(self, p: Parameters) -> tuple[float, Gradients]:
        """Draw the factor to 1, squares and offsets to 0."""
        changes = {"factor": p["factor"] - 1.0, "squares": p["squares"], "offsets": p["offsets"]}
        value = self._ridge * sum(float(np.vdot(change, change)) for change in changes.values())
        return value, {name: 2.0 * self._ridge * change for name, change in changes.items()}

    def starts(self) -> Sequence[Array]:
        return [type(self)(self.num_classes).coordinates()]

    def tempered(self, log_temperature: float) -> Sequence[Array]:
        """Take over the temperature, with the factor 1."""
        self.parameters["temperature"] = np.exp(np.array(log_temperature))
        return self.starts()

    def prepare(self, data: ValidationSet, tick: Callable[[float], None] = lambda fraction: None) -> None:
        """Fit the temperature."""
        self._ridge = 0.5 / data.effective
        self.parameters["temperature"] = np.array(best_temperature(data, tick)[0])
