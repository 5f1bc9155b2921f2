"""One logit map after another: what `ts+lb` and its like are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.parametrised import Limits


class Chain(LogitMap):
    """`T(g) = second(first(g))`, fitted jointly; each coordinate vector is the first's, then the second's."""

    perturbations = 4

    def __init__(self, first: LogitMap, second: LogitMap) -> None:
        super().__init__(first.num_classes)
        self.first = first
        self.second = second
        self.name = f"{first.name}+{second.name}"
        self.reads = first.reads
        self.is_network = first.is_network or second.is_network

    @property
    def width(self) -> int:
        """What the first map takes."""
        return self.first.width

    def forward(self, scores: Tensor) -> Tensor:
        """Apply one map, then the other."""
        mapped: Tensor = self.second(self.first(scores))
        return mapped

    def parameters_from(self, coordinates: Tensor) -> dict[str, Tensor]:
        """Read the first map's coordinates, then the second's."""
        first, second = torch.split(coordinates, [self.first.size, self.second.size])
        named = {f"first.{name}": value for name, value in self.first.parameters_from(first).items()}
        return named | {
            f"second.{name}": value for name, value in self.second.parameters_from(second).items()
        }

    def averaged(self, members: Sequence[Tensor]) -> Chain:
        """Average both maps."""
        size = self.first.size
        first = self.first.averaged([member[:size] for member in members])
        return Chain(first, self.second.averaged([member[size:] for member in members]))

    def starts(self) -> Sequence[Tensor]:
        """Start both maps everywhere."""
        return self.starts_from(self.first.starts())

    def starts_from(self, bases: Sequence[Tensor]) -> Sequence[Tensor]:
        """Start the second map everywhere, and the first from the coordinates given."""
        return [torch.cat([base, start]) for base in bases for start in self.second.starts()]

    def limits(self) -> Limits:
        """Limits of both."""
        return [*self.first.limits(), *self.second.limits()]

    def penalty(self, parameters: Mapping[str, Tensor]) -> Tensor | None:
        """Only the first map may have one."""
        return self.first.penalty(
            {name.removeprefix("first."): v for name, v in parameters.items() if name.startswith("first.")}
        )

    def prepare(self, data: ValidationSet) -> None:
        """Prepare the first map; the second one needs nothing."""
        self.first.prepare(data)

    def edges(self) -> Mapping[str, str]:
        """Only the first map may have some."""
        return self.first.edges()

    def saturation(self, scores: Tensor) -> float | None:
        """Only the first map may have a network."""
        return self.first.saturation(scores)

    def shift_of_inputs(self) -> Tensor | None:
        """Give the first map's."""
        return self.first.shift_of_inputs()

    def release(self) -> None:
        """Release the first map."""
        self.first.release()

    def invalid_reason(self) -> str | None:
        """Pass on what either says."""
        return self.first.invalid_reason() or self.second.invalid_reason()

    def describe(self) -> dict[str, Any]:
        """Return both maps' parameters."""
        return {**self.first.describe(), **self.second.describe()}
