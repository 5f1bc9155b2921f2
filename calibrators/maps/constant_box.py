"""`pb`: one lower and one upper bound for every class and every sample (section 3 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np

from boxcal.calibrators import array_ops
from boxcal.calibrators.maps.base import BoxMap
from boxcal.calibrators.maps.parameters import (
    Array,
    Gradients,
    Limits,
    Parameters,
    Shapes,
    Values,
    Vjp,
)

NARROWEST, WIDEST = math.log(1e-12), math.log(1.0 - 1e-9)


def box_at(ops: ModuleType, fraction: Values, slack: Values, num_classes: int) -> tuple[Values, Values]:
    """Give (lower, upper) for `fraction = lower * K` and the share of the upper bound's range left out.

    No probability exceeds `1 - (K - 1) lower`, so an upper bound above that is inert, its gradient exactly
    zero, and a search over the paper's own parameters can be caught there. This upper bound is never inert:
    `1/K + (1 - 1/K) (1 - lower K) (1 - slack)`.
    """
    share = 1.0 - 1.0 / num_classes
    upper = 1.0 / num_classes + share * (1.0 - fraction) * (1.0 - slack)
    return fraction / num_classes, ops.clip(upper, 1.0 / num_classes, 1.0)


class ConstantBounds(BoxMap):
    """A scalar box with `0 <= lower <= 1/K <= upper <= 1`, the paper's a and b; vacuous when fresh."""

    name = "pb"
    shapes: ClassVar[Shapes] = {"lower": (), "upper": ()}

    def fresh(self) -> dict[str, Any]:
        return {"lower": 0.0, "upper": 1.0}

    @classmethod
    def of(cls, num_classes: int, lower: float, upper: float) -> Self:
        """Build the box of two bounds."""
        return cls(num_classes, {"lower": lower, "upper": upper})

    @property
    def pair(self) -> tuple[float, float]:
        return self.parameters["lower"].item(), self.parameters["upper"].item()

    @property
    def is_vacuous(self) -> bool:
        """Whether the box holds every probability."""
        lower, upper = self.pair
        return lower <= 0.0 and upper >= 1.0

    def formula(self, ops: ModuleType, p: Parameters, logits: Values) -> tuple[Values, Values]:
        del ops, logits
        return p["lower"], p["upper"]

    def bounds(self, p: Parameters, reading: Array) -> tuple[Array, Array, Vjp]:
        """Give the two numbers for every row."""
        ones = np.ones(reading.shape[1])

        def back(by_lower: Array, by_upper: Array) -> tuple[Gradients, None]:
            return {"lower": by_lower.sum(), "upper": by_upper.sum()}, None

        return p["lower"] * ones, p["upper"] * ones, back

    def at(self, coordinates: Array) -> dict[str, Array]:
        """Read the log of `lower * K` and the log of the slack of the upper bound."""
        fraction, slack = np.exp(coordinates)
        lower, upper = box_at(array_ops, fraction, slack, self.num_classes)
        return {"lower": lower, "upper": upper}

    def slopes(self, coordinates: Array, gradients: Mapping[str, Array]) -> Array:
        """Carry derivatives in both bounds on: d upper = -(1 - 1/K) ((1 - slack) df + (1 - f) d slack)."""
        fraction, slack = np.exp(coordinates)
        through = (1.0 - 1.0 / self.num_classes) * gradients["upper"]
        by_fraction = gradients["lower"] / self.num_classes - through * (1.0 - slack)
        return np.array([fraction * by_fraction, -slack * through * (1.0 - fraction)])

    def coordinates(self) -> Array:
        """Give the two, within the limits."""
        lower, upper = self.pair
        fraction, least = lower * self.num_classes, 1.0 / self.num_classes
        slack = 1.0 - (upper - least) / max((1.0 - least) * (1.0 - fraction), 1e-300)
        within: Array = np.clip([fraction, slack], math.exp(NARROWEST), math.exp(WIDEST))
        return np.log(within)

    def limits(self) -> Limits:
        """From as good as vacuous to as good as uniform."""
        return [(NARROWEST, WIDEST)] * 2

    def invalid_reason(self) -> str | None:
        """Say so if no distribution lies in the box."""
        (lower, upper), even = self.pair, 1.0 / self.num_classes
        if 0.0 <= lower <= even + 1e-12 and even - 1e-12 <= upper <= 1.0:
            return None
        return f"no distribution over {self.num_classes} classes lies in [{lower}, {upper}]"
