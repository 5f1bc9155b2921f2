"""One logit map after another: what `ts+lb` and its like are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from boxcal.calibrators.maps.base import LogitMap, RowTemperature
from boxcal.calibrators.maps.parameters import Array, Gradients, Limits, Parameters, Values, Vjp

FIRST, SECOND = "first.", "second."


class Chain(LogitMap):
    """`T(g) = second(first(g))`, fitted jointly; each coordinate vector is the first's, then the second's."""

    perturbations = 4

    def __init__(self, first: LogitMap, second: LogitMap) -> None:
        self.first, self.second = first, second
        self.name = f"{first.name}+{second.name}"  # type: ignore[misc]
        self.num_classes, self.reads = first.num_classes, first.reads
        self.is_network = first.is_network or second.is_network
        self.has_onnx_form = first.has_onnx_form and second.has_onnx_form

    @property
    def parameters(self) -> dict[str, Array]:  # type: ignore[override]
        return _named(FIRST, self.first.parameters) | _named(SECOND, self.second.parameters)

    @property
    def size(self) -> int:
        return self.first.size + self.second.size

    @property
    def width(self) -> int:
        return self.first.width

    @property
    def tempering(self) -> RowTemperature | None:
        """The first map, if it divides rows."""
        return self.first.tempering

    @property
    def input_shift(self) -> Array | None:
        return self.first.input_shift

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Apply one map, then the other."""
        return self.second.formula(ops, _of(SECOND, p), self.first.formula(ops, _of(FIRST, p), scores))

    def __call__(self, scores: Values) -> Values:
        """Apply one map, then the other."""
        return self.second(self.first(scores))

    def precompute(self, scores: Array) -> Array | None:
        """Compute what the first map need compute only once."""
        return self.first.precompute(scores)

    def vjp(self, p: Parameters, scores: Array, precomputed: Any = None) -> tuple[Array, Vjp]:
        between, first_back = self.first.vjp(_of(FIRST, p), scores, precomputed)
        mapped, second_back = self.second.vjp(_of(SECOND, p), between)

        def back(by_mapped: Array, through: bool) -> tuple[Gradients, Array | None]:
            second, by_between = second_back(by_mapped, True)
            first, by_scores = first_back(by_between, through)
            return _named(FIRST, first) | _named(SECOND, second), by_scores

        return mapped, back

    def at(self, coordinates: Array) -> dict[str, Array]:
        """Read the first map's coordinates, then the second's."""
        size = self.first.size
        first, second = self.first.at(coordinates[:size]), self.second.at(coordinates[size:])
        return _named(FIRST, first) | _named(SECOND, second)

    def slopes(self, coordinates: Array, gradients: Mapping[str, Array]) -> Array:
        size = self.first.size
        first = self.first.slopes(coordinates[:size], _of(FIRST, gradients))
        return np.concatenate([first, self.second.slopes(coordinates[size:], _of(SECOND, gradients))])

    def coordinates(self) -> Array:
        return np.concatenate([self.first.coordinates(), self.second.coordinates()])

    def moved(self, coordinates: Array) -> Chain:
        size = self.first.size
        return Chain(self.first.moved(coordinates[:size]), self.second.moved(coordinates[size:]))

    def averaged(self, members: Sequence[Array]) -> Chain:
        size = self.first.size
        first = self.first.averaged([member[:size] for member in members])
        return Chain(first, self.second.averaged([member[size:] for member in members]))

    def fixed_between(self, plain: Array) -> Array:
        """Join the coordinates that both maps keep fixed."""
        size = self.first.size
        return np.concatenate(
            [self.first.fixed_between(plain[:size]), self.second.fixed_between(plain[size:])]
        )

    def starts(self) -> Sequence[Array]:
        return self.starts_from(self.first.starts())

    def starts_from(self, bases: Sequence[Array]) -> Sequence[Array]:
        """Start the second map everywhere, and the first from the coordinates given."""
        return [np.concatenate([base, start]) for base in bases for start in self.second.starts()]

    def limits(self) -> Limits:
        return [*self.first.limits(), *self.second.limits()]

    def penalty(self, p: Parameters) -> tuple[float, Gradients] | None:
        """Only the first map may have one."""
        found = self.first.penalty(_of(FIRST, p))
        if found is None:
            return None
        none = {name: np.zeros_like(value) for name, value in self.second.searched.items()}
        return found[0], _named(FIRST, found[1]) | _named(SECOND, none)

    def edges(self) -> Mapping[str, str]:
        """Only the first map may have some."""
        return self.first.edges()

    def release(self) -> None:
        self.first.release()

    def invalid_reason(self) -> str | None:
        return self.first.invalid_reason() or self.second.invalid_reason()

    def describe(self) -> dict[str, Any]:
        return {**self.first.describe(), **self.second.describe()}


def _named(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + name: value for name, value in values.items()}


def _of(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
