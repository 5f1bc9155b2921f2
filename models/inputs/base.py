"""What a request carries to a backbone: images or tensors, rows of features, texts, or nothing.

A backbone has one `Inputs`, which decodes what clients send to samples, and makes a batch of samples. All
between the two, such as the queue, only counts, splits and joins samples along their first dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from boxcal.models import UnusableInput
from boxcal.models.inputs.preprocessing import Preprocessing

MAX_DIMENSIONS = 32
LARGEST_EXAMPLE = 1000
"""Numbers of a tensor that somebody may read."""

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


class ImageInputs:
    """Encoded images, if there is a preprocessing, and tensors.

    `preprocessing`: turns an image into one sample; None where the backbone reads tensors only.
    `holds_bytes`: whether the model reads integers from 0 to 255.
    """

    def __init__(
        self, preprocessing: Preprocessing | None, shape: tuple[int, ...], *, holds_bytes: bool = False
    ) -> None:
        self.preprocessing = preprocessing
        self.shape = shape
        self._holds_bytes = holds_bytes
        self.kind: Kind = "tensors" if preprocessing is None else "images"
        self.members = ("tensor",) if preprocessing is None else ("image", "tensor")

    def refusal(self, member: str) -> str:
        """Say why this input cannot be read."""
        if member == "image":
            return (
                f"The model takes tensors of the shape {self.shape}; its declaration does not say how an "
                "image becomes one."
            )
        return f"The model takes {' or '.join(self.members)}, not {member}."

    def example(self) -> dict[str, Any] | None:
        """Give a tensor of zeros, if it is small."""
        if self.kind == "images" or math.prod(self.shape) > LARGEST_EXAMPLE:
            return None
        return {"tensor": np.zeros(self.shape).tolist()}

    def blank(self, count: int) -> Samples:
        """Give zeros (count, *shape), float32."""
        return np.zeros((count, *self.shape), np.float32)

    def decode(self, member: str, value: Any, max_pixels: int) -> Samples:
        """Turn an encoded image, or a tensor of nested lists, into one sample; raises BackboneError."""
        if member == "image" and self.preprocessing is not None:
            from boxcal.models.inputs.decoding import decode  # noqa: PLC0415 - not needed for tensors

            return decode(value, preprocessing=self.preprocessing, max_pixels=max_pixels)
        return self._read(read_tensor(value, self.shape), "tensor")

    def check(self, values: NDArray[Any]) -> Samples:
        """Check tensors (N, *shape), and convert them to float32."""
        if values.shape[1:] != self.shape or values.ndim == 0 or not len(values):
            expected = ", ".join(("N", *map(str, self.shape)))
            raise UnusableInput(f"The array has the shape {values.shape}; the model takes ({expected}).")
        with np.errstate(over="ignore"):
            samples = values.astype(np.float32)
        return self._read(_finite(samples, "array"), "array")

    def batch(self, samples: Samples) -> Samples:
        """Give the samples as they are."""
        return samples

    def _read(self, samples: Samples, name: str) -> Samples:
        if self._holds_bytes and not np.array_equal(samples, np.clip(np.rint(samples), 0, 255)):
            raise UnusableInput(f"The {name} holds other numbers than integers from 0 to 255 (uint8).")
        return samples


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


def read_tensor(value: Any, shape: Sequence[int]) -> NDArray[np.float32]:
    """Read one input from nested JSON lists."""
    if (actual := _shape(value)) != tuple(shape):
        raise UnusableInput(f"The tensor has the shape {actual}; the model takes {tuple(shape)}.")
    samples = np.empty(actual, np.float32)
    _fill(samples, value)
    return _finite(samples, "tensor")


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape of nested lists, by the first item of each."""
    shape: tuple[int, ...] = ()
    while isinstance(value, list) and len(shape) <= MAX_DIMENSIONS:
        shape = (*shape, len(value))
        value = value[0] if value else None
    return shape


def _fill(target: NDArray[np.float32], value: Any) -> None:
    """Fill an array from nested lists, one innermost list at a time; other threads can run between."""
    if not isinstance(value, list) or len(value) != len(target):
        raise UnusableInput("The tensor is ragged: its lists differ in length.")
    if target.ndim > 1:
        for part, item in zip(target, value, strict=True):
            _fill(part, item)
        return
    try:
        if not all(type(number) in (float, int) for number in value):
            raise UnusableInput("The tensor holds something that is not a number.")
        with np.errstate(over="ignore"):
            target[...] = np.array(value, np.float64)
    except OverflowError:
        raise UnusableInput("The tensor holds an integer that is too large.") from None


def _finite(samples: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    if not np.isfinite(samples).all():
        raise UnusableInput(f"The {name} holds NaN, or numbers that are infinite in float32.")
    return samples
