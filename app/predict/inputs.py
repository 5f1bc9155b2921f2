"""One input as it was sent, and how it becomes one sample: the first work done for a request, in the pool."""

from __future__ import annotations

import binascii
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.app.errors import BoxcalError, ImageTooLarge, InvalidInput
from boxcal.app.predict.arrays import read_tensor
from boxcal.models.errors import InvalidImage, TooManyPixels


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An encoded image: its bytes."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Base64Image:
    """An encoded image inside JSON: its bytes in base64."""

    text: str


@dataclass(frozen=True, slots=True)
class NestedTensor:
    """A preprocessed input inside JSON: nested lists of numbers."""

    values: list[Any]


Input = EncodedImage | Base64Image | NestedTensor


class Decoder:
    """Turns what was sent into samples of the backbone's input shape.

    Parameters
    ----------
    decode_image
        From the bytes of an image to one sample; None where the backbone reads tensors only.
    input_shape
        Of one sample.
    """

    def __init__(
        self, decode_image: Callable[[bytes], NDArray[np.float32]] | None, input_shape: tuple[int, ...]
    ) -> None:
        self._decode_image = decode_image
        self.input_shape = input_shape

    def decode(self, sent: Input, name: str = "") -> NDArray[np.float32]:
        """Decode one input.

        Parameters
        ----------
        sent
            The input.
        name
            What errors call it, where a request holds several.

        Raises
        ------
        BoxcalError
            It is no image, no base64, or a tensor that does not fit.
        """
        try:
            if isinstance(sent, NestedTensor):
                return read_tensor(sent.values, self.input_shape)
            data = sent.data if isinstance(sent, EncodedImage) else _from_base64(sent.text)
            if self._decode_image is None:
                raise InvalidInput(
                    f"The model takes tensors of the shape {self.input_shape}; nothing declares how a "
                    "image becomes one."
                )
            return self._decode_image(data)
        except InvalidImage as error:
            leaf = ImageTooLarge if isinstance(error, TooManyPixels) else InvalidInput
            raise leaf(f"{name}: {error}" if name else str(error)) from error
        except BoxcalError as error:
            if name:
                raise type(error)(f"{name}: {error.detail}") from error
            raise


def _from_base64(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError as error:
        raise InvalidInput(f"The image is not base64: {error}.") from error
