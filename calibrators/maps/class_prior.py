"""Adjustments of a fitted calibrator: offsets of classes, such as other class frequencies, and a temperature.

`fit` does not make it: class frequencies come from traffic without labels, see
`boxcal.calibrators.monitoring.candidates`.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.parameters import Array, Gradients, Parameters, Shapes, Values, Vjp


class ClassPriorAdjustment(LogitMap):
    """`T(z) = (z + offsets) / temperature`, z the logits that a fitted map gives.

    With offsets `log(new / old class frequencies)` and temperature 1 this is Bayes' rule for class
    frequencies that have changed while the inputs of each class have not (Saerens et al. 2002).
    """

    name = "em"
    shapes: ClassVar[Shapes] = {"adjustment_offsets": ("K",), "adjustment_temperature": ()}
    positive = ("adjustment_temperature",)
    is_listed = False

    def fresh(self) -> dict[str, Any]:
        return {"adjustment_offsets": np.zeros(self.num_classes), "adjustment_temperature": 1.0}

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Add the offsets to (N, K) logits and divide by the temperature."""
        del ops
        return (scores + p["adjustment_offsets"]) / p["adjustment_temperature"]

    def vjp(self, p: Parameters, scores: Array, precomputed: Any = None) -> tuple[Array, Vjp]:
        """Add and divide: dT = (dz + do) / t - T dt / t."""
        temperature = p["adjustment_temperature"]
        mapped = (scores + p["adjustment_offsets"]) / temperature

        def back(by_mapped: Array, through: bool) -> tuple[Gradients, Array | None]:
            gradients = {
                "adjustment_offsets": by_mapped.sum(axis=0) / temperature,
                "adjustment_temperature": -np.vdot(by_mapped, mapped) / temperature,
            }
            return gradients, by_mapped / temperature if through else None

        return mapped, back
