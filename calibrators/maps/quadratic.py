"""`quadratic`: the logits and their squares; for two classes, logistic regression on log odds and square."""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from boxcal.calibrators.maps.parameters import Array, Gradients, Parameters, Shapes, Values, Vjp
from boxcal.calibrators.maps.temperature import TemperedMap


class QuadraticScaling(TemperedMap):
    """`T(g) = w x + v * x^2 + w'` with x = g / temperature, v and w' of each class's own (Berta et al. 2025).

    A ridge of half a sample on w - 1, v and w' keeps a fit of few samples finite. The objective is convex.
    """

    name = "quadratic"
    stacked = "of two classes"
    shapes: ClassVar[Shapes] = {"temperature": (), "factor": (), "squares": ("K",), "offsets": ("K",)}

    def fresh(self) -> dict[str, Any]:
        """Begin with the factor 1, and 0 for the rest."""
        none = np.zeros(self.num_classes)
        return {"temperature": 1.0, "factor": 1.0, "squares": none, "offsets": none}

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Map (N, K) logits, entry by entry."""
        del ops
        x = scores / p["temperature"]
        return x * p["factor"] + x * x * p["squares"] + p["offsets"]

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
        ridge = 0.5 / self.samples
        value = ridge * sum(float(np.vdot(change, change)) for change in changes.values())
        return value, {name: 2.0 * ridge * change for name, change in changes.items()}
