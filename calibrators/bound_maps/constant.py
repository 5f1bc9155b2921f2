"""`pb`: one lower and one upper bound for every class and every sample (section 3 of the paper)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators import formulas, tensor_ops
from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.parametrised import Limits, Parametrised, parameter

Array = np.ndarray[Any, Any]

NARROWEST, WIDEST = math.log(1e-12), math.log(1.0 - 1e-9)


class ConstantBounds(BoundMap):
    """A scalar box with `0 <= lower <= 1/K <= upper <= 1`, the paper's a and b; vacuous when fresh."""

    name = "pb"

    def __init__(self, num_classes: int, lower: float = 0.0, upper: float = 1.0) -> None:
        super().__init__(num_classes)
        self.lower = parameter(lower)
        self.upper = parameter(upper)

    @property
    def is_vacuous(self) -> bool:
        """Whether the box holds every probability."""
        return self.lower.item() <= 0.0 and self.upper.item() >= 1.0

    def box(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Give the two numbers."""
        del logits
        return self.lower, self.upper

    def parameters_from(self, coordinates: Tensor) -> dict[str, Tensor]:
        """Read the log of `lower * K` and the log of the slack of the upper bound."""
        lower, upper = formulas.box_at(
            tensor_ops, coordinates[0].exp(), coordinates[1].exp(), self.num_classes
        )
        return {"lower": lower, "upper": upper}

    def coordinates(self) -> Array:
        """Give the two, within the limits."""
        fraction = self.lower.item() * self.num_classes
        least = 1.0 / self.num_classes
        slack = 1.0 - (self.upper.item() - least) / max((1.0 - least) * (1.0 - fraction), 1e-300)
        within: Array = np.clip([fraction, slack], math.exp(NARROWEST), math.exp(WIDEST))
        return np.log(within)

    def limits(self) -> Limits:
        """From as good as vacuous to as good as uniform."""
        return [(NARROWEST, WIDEST)] * 2

    def coordinates_of(self, other: Parametrised) -> Tensor:
        """Take over constant bounds."""
        return torch.from_numpy(other.coordinates())

    def invalid_reason(self) -> str | None:
        """Say so if no distribution lies in the box."""
        return formulas.invalid_box(self, self.num_classes)
