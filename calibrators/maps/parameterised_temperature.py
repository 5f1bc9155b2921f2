"""`pts`: parameterised temperature scaling, a temperature for every sample (Tomani et al. 2022; IBTS/PTS)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.maps.base import LogitMap, RowTemperature
from boxcal.calibrators.maps.network import (
    DRAWS,
    NetworkMap,
    forward,
    fresh_network,
    network_outputs,
    network_shapes,
)
from boxcal.calibrators.maps.parameters import Array, Gradients, Parameters, Shapes, Values, Vjp
from boxcal.calibrators.maps.temperature import best_temperature


class ParameterisedTemperature(NetworkMap, RowTemperature):
    """`T(g) = g / (temperature exp(network(g / temperature)))`; `temperature` is that of `ts`."""

    name = "pts"
    shapes: ClassVar[Shapes] = {"temperature": (), **network_shapes(1)}
    positive = ("temperature",)
    combines = True
    contains_ts = True

    def fresh(self) -> dict[str, Any]:
        """Begin with the temperature 1 for every row."""
        return {"temperature": 1.0, **fresh_network(self.num_classes, [0.0])}

    def inverse_formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Ask the network for 1 / temperature of every row, (N, 1)."""
        return ops.exp(-network_outputs(ops, p, scores / p["temperature"])) / p["temperature"]

    def reading(self, columns: Array) -> Array:
        """Give what the network reads of the divided logits."""
        return super().reading(columns / self.parameters["temperature"])

    def reading_back(self, columns: Array, by_reading: Array) -> Array:
        """Divide the derivatives in the divided logits."""
        unit = self.parameters["temperature"]
        by_columns: Array = super().reading_back(columns / unit, by_reading) / unit
        return by_columns

    def inverse(self, p: Parameters, reading: Array) -> tuple[Array, Vjp]:
        """Give r = exp(-network) / temperature, and dr = -r d network."""
        outputs, network_back = forward(p, reading)
        inverse: Array = np.exp(-outputs[0]) / p["temperature"]

        def back(by_inverse: Array) -> tuple[Gradients, Array]:
            found: tuple[Gradients, Array] = network_back(-(by_inverse * inverse)[None])
            return found

        return inverse, back

    def starts(self) -> Sequence[Array]:
        """Start at `ts`, with several draws of the hidden layers."""
        return self.tempered(float(np.log(self.parameters["temperature"])))

    def tempered(self, log_temperature: float) -> Sequence[Array]:
        """Answer the same everywhere."""
        change = log_temperature - float(np.log(self.parameters["temperature"]))
        return [self.started([change], seed) for seed in range(DRAWS)]

    def prepare(self, data: ValidationSet, tick: Callable[[float], None] = lambda fraction: None) -> None:
        """Fit the temperature that the network changes, and let it see the logits that this gives."""
        temperature = best_temperature(data, tick)[0]
        self.parameters["temperature"] = np.array(temperature)
        self.prepare_network(data.scores / temperature)

    def variants(self, logits: Array) -> list[Self]:
        return super().variants(logits / self.parameters["temperature"])

    def adopt(self, alone: LogitMap) -> None:
        """Read what the network of the map alone reads."""
        if isinstance(alone, ParameterisedTemperature):
            self.adopt_network(alone)

    def saturation(self, logits: Array) -> float:
        return super().saturation(logits / self.parameters["temperature"])
