"""What logit maps and bound maps share: float64 parameters, and coordinates in which a fit searches them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

Limits = Sequence[tuple[float | None, float | None]]


class Parametrised(nn.Module):
    """A module with float64 parameters that a fit chooses.

    A subclass creates its parameters in `__init__` so that a fresh module changes nothing. A fit sees them
    through *coordinates*: one flat vector in which the search is well scaled. By default these are the
    parameters themselves, in the order they were created.
    """

    name: str
    """The name that `methods()` lists, such as `ts`."""

    is_network: bool = False
    """Whether its parameters are those of a network, whose fit stops early by cross-validation."""

    positive: tuple[str, ...] = ()
    """Names of tensors whose entries are above 0."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes

    @property
    def size(self) -> int:
        """How many coordinates there are."""
        return sum(parameter.numel() for parameter in self.parameters())

    def parameters_from(self, coordinates: Tensor) -> dict[str, Tensor]:
        """Give the named parameters at a vector of coordinates, differentiably."""
        named = list(self.named_parameters())
        pieces = torch.split(coordinates, [parameter.numel() for _, parameter in named])
        return {
            name: piece.reshape(parameter.shape)
            for piece, (name, parameter) in zip(pieces, named, strict=True)
        }

    def limits(self) -> Limits:
        """Lower and upper limit of every coordinate, None where there is none."""
        return [(None, None)] * self.size

    def set_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Store fitted parameters."""
        with torch.no_grad():
            for name, own in self.named_parameters():
                own.copy_(values[name].detach().reshape(own.shape))

    def set_coordinates(self, coordinates: Tensor) -> None:
        """Store the parameters at a vector of coordinates."""
        self.set_parameters(self.parameters_from(coordinates))

    def coordinates(self) -> np.ndarray[Any, Any]:
        """Give the coordinates of the parameters as they are, where these are the parameters themselves."""
        pieces = [own.detach().flatten() for own in self.parameters()]
        return torch.cat([torch.empty(0, dtype=torch.float64), *pieces]).numpy()

    def invalid_reason(self) -> str | None:
        """Say which stored parameter no fit could have produced, if there is one."""
        tensors = self.state_dict()
        lowest = {name: tensors[name].min().item() for name in self.positive}
        return next(
            (f"{name} must be positive; it is {low}" for name, low in lowest.items() if low <= 0.0), None
        )

    def averaged(self, members: Sequence[Tensor]) -> Self:
        """Give a map between several coordinates: by default, at their mean."""
        mean = deepcopy(self)
        mean.set_coordinates(torch.stack(list(members)).mean(dim=0))
        return mean

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], num_classes: int) -> Self:
        """Build a module of the stored tensors' sizes; their values are loaded afterwards."""
        del tensors
        return cls(num_classes)

    def describe(self) -> dict[str, Any]:
        """Return the parameters as people read them: numbers for scalars, lists for short vectors."""
        return {name: readable(value) for name, value in self.state_dict().items()}


def parameter(values: float | Sequence[float] | Tensor) -> nn.Parameter:
    """Create a float64 parameter."""
    return nn.Parameter(torch.as_tensor(values, dtype=torch.float64).clone())


def vector(*values: float) -> Tensor:
    """Create a float64 vector of coordinates."""
    return torch.tensor(values, dtype=torch.float64)


def readable(value: Tensor) -> Any:
    """Return a scalar as a number, up to 32 entries as a list, anything larger by its shape."""
    if value.numel() == 1:
        return value.item()
    return value.tolist() if value.numel() <= 32 else f"tensor of shape {tuple(value.shape)}"
