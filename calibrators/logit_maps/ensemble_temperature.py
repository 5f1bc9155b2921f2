"""`ets`: ensemble temperature scaling, softened, raw and uniform probabilities mixed (Zhang et al. 2020)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from boxcal.calibrators import formulas, tensor_ops
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.logit_maps.temperature import HIGHEST, LOWEST, best_temperature
from boxcal.calibrators.parametrised import Limits, parameter, vector

SMALLEST = 1e-300
"""Label probabilities below this count as this in a fit; it keeps logarithms finite."""


class EnsembleTemperatureScaling(LogitMap):
    """`T(g) = log(w1 softmax(g / temperature) + w2 softmax(g) + w3 / K)`, weights on the simplex."""

    name = "ets"
    contains_ts = True
    normalises = True

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.temperature = parameter(1.0)
        self.mixture_weights = parameter([0.0, 1.0, 0.0])
        self._unit = 1.0

    def forward(self, scores: Tensor) -> Tensor:
        """Mix three distributions over (N, K) logits and return the log, exactly however small it is."""
        mapped: Tensor = formulas.ensemble(tensor_ops, self, scores)
        return mapped

    def parameters_from(self, coordinates: Tensor) -> dict[str, Tensor]:
        """Read the log of the temperature and three masses, of which only the shares matter."""
        masses = coordinates[1:]
        return {"temperature": coordinates[0].exp(), "mixture_weights": masses / masses.sum()}

    def starts(self) -> Sequence[Tensor]:
        """Mix some of each, at temperatures on both sides of that of `ts`."""
        return [
            vector(math.log(temperature * self._unit), *weights)
            for temperature in (2.0, 1.2, 0.7, 4.0)
            for weights in ((0.8, 0.15, 0.05), (0.3, 0.65, 0.05), (0.97, 0.02, 0.01), (0.5, 0.2, 0.3))
        ]

    def tempered(self, log_temperature: float) -> Sequence[Tensor]:
        """Mix nothing in."""
        return [vector(log_temperature, 1.0, 0.0, 0.0)]

    def limits(self) -> Limits:
        """Temperatures around that of `ts`; masses of 0 to 1."""
        return [(math.log(LOWEST * self._unit), math.log(HIGHEST * self._unit)), *[(0.0, 1.0)] * 3]

    def prepare(self, data: ValidationSet) -> None:
        """Find the temperature of `ts`."""
        self._unit = best_temperature(data)[0]

    def invalid_reason(self) -> str | None:
        """Say so if the temperature is not positive, or the weights do not add up to 1."""
        return formulas.invalid_ensemble(self, self.num_classes)
