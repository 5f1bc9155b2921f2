"""`ts`: temperature scaling, the logits divided by one number (Guo et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from calibrators.logit_maps.base import LogitMap, parameter

LOWEST, HIGHEST = 1e-3, 1e4


class TemperatureScaling(LogitMap):
    """`T(g) = g / temperature`: above 1 it softens overconfident predictions, below 1 it sharpens them."""

    name: ClassVar[str] = "ts"

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.temperature = parameter(1.0)

    def forward(self, scores: Tensor) -> Tensor:
        """Divide (N, K) logits by the temperature."""
        return scores / self.temperature

    def parameters_from(self, coordinates: Tensor) -> dict[str, Tensor]:
        """Read the one coordinate, the log of the temperature."""
        return {"temperature": coordinates[0].exp()}

    def complaint(self) -> str | None:
        """A temperature is positive."""
        value = self.temperature.item()
        return None if value > 0.0 else f"the temperature {value} is not positive"

    def starts(self) -> Sequence[Tensor]:
        """No change, twice as soft, and four times as soft."""
        return [torch.tensor([math.log(t)], dtype=torch.float64) for t in (1.0, 2.0, 4.0)]

    def limits(self) -> Sequence[tuple[float | None, float | None]]:
        """Temperatures of 0.001 to 10,000; the certificate says where the data would have one beyond."""
        return [(math.log(LOWEST), math.log(HIGHEST))]
