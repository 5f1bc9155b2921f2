"""What a request carries to a backbone: images or tensors, rows of features, texts, or nothing.

A backbone has one `Inputs`, which decodes what clients send to samples, and makes a batch of samples. All
between the two, such as the queue, only counts, splits and joins samples along their first dimension.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from numpy.typing import NDArray

from boxcal.models import UnusableInput

Kind = Literal["images", "tensors", "rows", "texts", "none"]
Samples = NDArray[Any]
"""N samples, as an array of N rows."""


class Inputs(Protocol):
    """The inputs of one backbone."""

    @property
    def kind(self) -> Kind: ...
    @property
    def members(self) -> tuple[str, ...]: ...
    @property
    def shape(self) -> tuple[int, ...]: ...

    def refusal(self, member: str) -> str:
        """Say why an input with this member, which is not among `members`, cannot be read."""
        ...

    def example(self) -> dict[str, Any] | None:
        """Give one input of a JSON body that can be read; None for images, large tensors and no model."""
        ...

    def blank(self, count: int) -> Samples:
        """Give `count` samples of zeros, to be overwritten or to warm up with."""
        ...

    def decode(self, member: str, value: Any, max_pixels: int) -> Samples:
        """Turn one input into one sample, without the first dimension."""
        ...

    def check(self, values: NDArray[Any]) -> Samples:
        """Turn an array of numbers (N, ...) into samples."""
        ...

    def batch(self, samples: Samples) -> Any:
        """Turn samples into what the backbone is called with."""
        ...


class NoInputs:
    """Nothing: there is no model, and clients send logits."""

    kind: Kind = "none"
    members: tuple[str, ...] = ()
    shape: tuple[int, ...] = ()
    refused = "No backbone is loaded for this model: post its logits or probabilities to /calibrate."

    def refusal(self, member: str) -> str:
        """Say that nothing is read."""
        return self.refused

    def example(self) -> None:
        """Give nothing."""

    def blank(self, count: int) -> Samples:
        raise UnusableInput(self.refused)

    def decode(self, member: str, value: Any, max_pixels: int) -> Samples:
        raise UnusableInput(self.refused)

    def check(self, values: NDArray[Any]) -> Samples:
        raise UnusableInput(self.refused)

    def batch(self, samples: Samples) -> Any:
        raise UnusableInput(self.refused)
