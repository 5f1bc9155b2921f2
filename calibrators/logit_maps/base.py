"""What every logit map is: the first stage of a calibrator, `T` in `p = BCSoftmax(T(g); a, b)`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

Reads = Literal["logits", "features", "inputs"]


class LogitMap(nn.Module):
    """A map from what it `reads` to logits (N, K), with float64 parameters that a fit chooses.

    A subclass creates its parameters at the identity in `__init__`, so that a fresh map changes nothing, and
    implements `forward`. A fit sees the parameters through *coordinates*: one flat vector in which the search
    is well scaled. By default these are the parameters themselves, in the order they were created.
    """

    name: ClassVar[str]
    """The name that `methods()` lists, such as `ts`."""

    reads: ClassVar[Reads] = "logits"
    """What `forward` takes: logits (N, K), features (N, D), or logits of inputs that the map has shifted."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes

    def forward(self, scores: Tensor) -> Tensor:
        """Map (N, K) logits, or (N, D) features, to (N, K) logits."""
        raise NotImplementedError

    def parameters_from(self, coordinates: Tensor) -> dict[str, Tensor]:
        """Give the named parameters at a vector of coordinates, differentiably."""
        sizes = [parameter.numel() for parameter in self.parameters()]
        pieces = torch.split(coordinates, sizes)
        return {
            name: piece.reshape(parameter.shape)
            for piece, (name, parameter) in zip(pieces, self.named_parameters(), strict=True)
        }

    def starts(self) -> Sequence[Tensor]:
        """Coordinates from which a fit descends; the first one is the identity or nearest to it."""
        raise NotImplementedError

    def limits(self) -> Sequence[tuple[float | None, float | None]] | None:
        """Lower and upper limit of every coordinate, None where there is none."""
        return None

    def penalty(self, parameters: Mapping[str, Tensor]) -> Tensor | None:
        """Regularisation added to the mean loss while fitting."""
        del parameters
        return None

    def set_parameters(self, values: Mapping[str, Tensor]) -> None:
        """Store fitted parameters."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(values[name].detach().reshape(parameter.shape))

    def complaint(self) -> str | None:
        """Say which stored parameter no fit could have produced, if there is one."""
        return None

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], num_classes: int) -> Self:
        """Build a map of the stored tensors' sizes; their values are loaded afterwards."""
        del tensors
        return cls(num_classes)

    def describe(self) -> dict[str, Any]:
        """Return the parameters as people read them: numbers for scalars, lists for short vectors."""
        return {name: readable(value) for name, value in self.state_dict().items()}


def parameter(values: float | Sequence[float] | Tensor) -> nn.Parameter:
    """Create a float64 parameter."""
    return nn.Parameter(torch.as_tensor(values, dtype=torch.float64).clone())


def readable(value: Tensor) -> Any:
    """Return a scalar as a number, a vector of up to 32 entries as a list, anything larger by its shape."""
    if value.numel() == 1:
        return value.item()
    return value.tolist() if value.numel() <= 32 else f"tensor of shape {tuple(value.shape)}"
