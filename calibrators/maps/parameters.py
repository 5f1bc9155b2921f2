"""What every map has: named float64 parameters, a stored form, and coordinates for the search of a fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from math import prod
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from boxcal.calibrators.errors import ArtifactError

Array = np.ndarray[Any, Any]
Values = Any
"""An ndarray or a tensor of torch, as the operations take it."""
Parameters = Mapping[str, Any]
"""By their names: float64 arrays, or tensors where the formula is given the operations of torch."""
Gradients = dict[str, Array]
Vjp = Callable[..., Any]
"""From derivatives in what a map gives to those in its parameters and in what it takes."""
Limits = Sequence[tuple[float | None, float | None]]
Size = int | str
"""A number, or a letter: K classes, the T largest logits, D features, P places, H hidden units, R logits and
products of two."""
Shapes = Mapping[str, tuple[Size, ...] | None]
"""Of tensors by their names; None for any shape."""
TOP = 10
"""How many of the largest logits a network reads."""
HIDDEN = 5
"""Units of each layer of a network in a fit; the mean of five is stored as one with five times as many."""


class Map:
    """Named float64 parameters, and coordinates: one flat vector in which a fit searches them."""

    name: ClassVar[str]
    """The name that `methods()` lists, such as `ts`."""

    shapes: ClassVar[Shapes] = {}
    """Of each stored tensor, in the order of the coordinates."""

    prepared: ClassVar[tuple[str, ...]] = ()
    """Tensors that are taken from the data before a fit, and not searched."""

    positive: ClassVar[tuple[str, ...]] = ()
    """Tensors whose entries are above 0."""

    per_class: ClassVar[int] = 0
    """How many parameters a class counts as where no fit searches them."""

    is_network: bool = False
    """Whether its parameters are those of a network, whose fit stops early by cross-validation."""

    def __init__(self, num_classes: int, parameters: Mapping[str, Any] | None = None) -> None:
        self.num_classes = num_classes
        given = {**self.fresh(), **(parameters or {})}
        self.parameters: dict[str, Array] = {
            name: np.asarray(value, np.float64) for name, value in given.items()
        }

    def fresh(self) -> dict[str, Any]:
        """Give parameters with which the map changes nothing."""
        return {}

    @property
    def searched(self) -> dict[str, Array]:
        """The parameters that a fit searches."""
        return {name: value for name, value in self.parameters.items() if name not in self.prepared}

    @classmethod
    def count(cls, num_classes: int) -> int:
        """Count the parameters that a fit chooses for K classes; a tensor of any shape counts as one."""
        sizes = {**_sizes(num_classes), "D": 1, "H": HIDDEN}
        searched = [shape or () for name, shape in cls.shapes.items() if name not in cls.prepared]
        return cls.per_class * num_classes + sum(
            prod(size if isinstance(size, int) else sizes[size] for size in shape) for shape in searched
        )

    @property
    def size(self) -> int:
        """How many coordinates there are."""
        return sum(value.size for value in self.searched.values())

    def at(self, coordinates: Array) -> dict[str, Array]:
        """Give all parameters at a vector of coordinates."""
        own, found, begin = self.searched, dict(self.parameters), 0
        for name, value in own.items():
            found[name] = coordinates[begin : begin + value.size].reshape(value.shape)
            begin += value.size
        return found

    def slopes(self, coordinates: Array, gradients: Mapping[str, Array]) -> Array:
        """Carry derivatives in the parameters at some coordinates on to these."""
        del coordinates
        return np.concatenate([np.empty(0), *(np.ravel(gradients[name]) for name in self.searched)])

    def coordinates(self) -> Array:
        """Give the coordinates of the parameters as they are."""
        return np.concatenate([np.empty(0), *(value.ravel() for value in self.searched.values())])

    def set_coordinates(self, coordinates: Array) -> None:
        """Take the parameters at a vector of coordinates."""
        self.parameters = {name: np.array(value) for name, value in self.at(coordinates).items()}

    def moved(self, coordinates: Array) -> Self:
        """Give the map at a vector of coordinates."""
        other = copy(self)
        other.set_coordinates(coordinates)
        return other

    def limits(self) -> Limits:
        """Lower and upper limit of every coordinate, None where there is none."""
        return [(None, None)] * self.size

    def averaged(self, members: Sequence[Array]) -> Self:
        """Give a map between several coordinates: by default, at their mean."""
        return self.moved(np.mean(members, axis=0))

    def fixed_between(self, plain: Array) -> Array:
        """Say of each coordinate whether it stays as it is between networks and an answer at `plain`."""
        return np.zeros(len(plain), bool)

    def invalid_reason(self) -> str | None:
        """Say which parameter no fit could have produced, if there is one."""
        lowest = {name: self.parameters[name].min().item() for name in self.positive}
        return next(
            (f"{name} must be positive; it is {low}" for name, low in lowest.items() if low <= 0.0), None
        )

    def describe(self) -> dict[str, Any]:
        """Return the parameters as people read them: numbers for scalars, lists for short vectors."""
        return {name: readable(value) for name, value in self.parameters.items()}

    @classmethod
    def restored(cls, tensors: Mapping[str, Array], num_classes: int, part: str) -> Self:
        """Build the map of stored tensors."""
        sizes = _sizes(num_classes)
        own: dict[str, Any] = {}
        for name, shape in cls.shapes.items():
            tensor = tensors.get(name)
            if tensor is None or (shape is not None and not _fits(tensor.shape, shape, sizes)):
                wanted = tuple(
                    size if isinstance(size, int) else sizes.get(size, size) for size in shape or ()
                )
                found = "missing" if tensor is None else tensor.shape
                raise ArtifactError(
                    f"the tensor {f'{part}.{name}'!r} should have shape {wanted}; it is {found}"
                )
            own[name] = tensor
        return cls(num_classes, own)


def with_products(num_classes: int) -> int:
    """Count K logits and the products of two of them, squares too: K (K + 3) / 2."""
    return num_classes * (num_classes + 3) // 2


def _sizes(num_classes: int) -> dict[str, int]:
    return {"K": num_classes, "T": min(TOP, num_classes), "R": with_products(num_classes)}


def readable(value: Array) -> Any:
    """Return a scalar as a number, up to 32 entries as a list, anything larger by its shape."""
    if value.size == 1:
        return value.item()
    return value.tolist() if value.size <= 32 else f"tensor of shape {tuple(value.shape)}"


def _fits(actual: tuple[int, ...], shape: tuple[Size, ...], sizes: dict[str, int]) -> bool:
    """Compare a shape; a letter of unknown size takes the first that it meets."""
    return len(actual) == len(shape) and all(
        size == (wanted if isinstance(wanted, int) else sizes.setdefault(wanted, size))
        for size, wanted in zip(actual, shape, strict=True)
    )


class Solution(NamedTuple):
    """How a map's own solver did, for the certificate; the gradient norm is nan where there is none."""

    gradient_norm: float
    starts: int
    starts_agreeing: int
    evaluations: int
