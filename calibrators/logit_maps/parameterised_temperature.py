"""`pts`: parameterised temperature scaling, a temperature for every sample (Tomani et al. 2022; IBTS/PTS)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from boxcal.calibrators import formulas, tensor_ops
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.formulas import HIDDEN
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.logit_maps.temperature import RowTemperature, best_temperature
from boxcal.calibrators.network import DRAWS, NetworkMap


class ParameterisedTemperature(NetworkMap, RowTemperature):
    """`T(g) = g / (temperature exp(network(g / temperature)))`; `temperature` is that of `ts`."""

    name = "pts"
    outputs = (0.0,)
    contains_ts = True
    positive = ("temperature",)
    added_later = ("temperature",)
    temperature: Tensor

    def __init__(self, num_classes: int, hidden: int = HIDDEN) -> None:
        super().__init__(num_classes, hidden)
        self.register_buffer("temperature", torch.ones((), dtype=torch.float64))

    def inverse_temperature(self, scores: Tensor) -> Tensor:
        """Ask the network for every row."""
        found: Tensor = formulas.inverse_temperature(tensor_ops, self, scores)
        return found

    def starts(self) -> Sequence[Tensor]:
        """Start at `ts`, with several draws of the hidden layers."""
        return self.tempered(self.temperature.log().item())

    def tempered(self, log_temperature: float) -> Sequence[Tensor]:
        """Answer the same everywhere."""
        return [
            self.network.start([log_temperature - self.temperature.log().item()], seed)
            for seed in range(DRAWS)
        ]

    def prepare(self, data: ValidationSet) -> None:
        """Fit the temperature that the network changes, and let it see the logits that this gives."""
        self.temperature.fill_(best_temperature(data)[0])
        self.network.prepare(data.scores / self.temperature)

    def variants(self, data: ValidationSet) -> Sequence[Self]:
        """Give a map for each choice of what the network reads, where there is one."""
        return self.with_each_reading(data.scores / self.temperature)

    def adopt(self, alone: LogitMap) -> None:
        """Read what the network of the map alone reads."""
        if isinstance(alone, ParameterisedTemperature):
            self.network.adopt(alone.network)

    def saturation(self, scores: Tensor) -> float:
        """Ask the network."""
        return self.network.saturation(scores / self.temperature)
