"""Turn a decoded image into one input of a backbone, exactly as in the network's training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image


class Preprocessing(Protocol):
    """Turns an image into one input."""

    @property
    def input_shape(self) -> tuple[int, ...]: ...

    @property
    def background(self) -> int:
        """Grey level (0 black, 255 white) behind a transparent image."""
        ...

    def needed_size(self, width: int, height: int) -> tuple[int, int]:
        """Smallest width and height to which a decoder may shrink an image of this size."""
        ...

    def __call__(self, image: Image.Image) -> NDArray[np.float32]:
        """Turn an image in mode RGB into one input."""
        ...


@dataclass(frozen=True, slots=True)
class ImageClassification:
    """Resize the short side, crop the centre, scale to [0, 1], normalise, as torchvision's preset."""

    resize: int | tuple[int, ...]  # Length of the short side after resizing, in pixels; or height and width
    # Side of the square that is cut from the centre, in pixels; None after a resize to height and width
    crop: int | None
    mean: tuple[float, ...]  # Per channel, on the scale [0, 1]: three numbers for colour, one for grey
    std: tuple[float, ...]
    interpolation: Image.Resampling = Image.Resampling.BILINEAR
    channels_last: bool = False  # Whether the channels are the last dimension of an input, not the first

    @property
    def background(self) -> int:
        """White, as on a page."""
        return 255

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height and width, in the layout's order."""
        channels, (height, width) = len(self.mean), self.size
        return (height, width, channels) if self.channels_last else (channels, height, width)

    @property
    def size(self) -> tuple[int, int]:
        """Height and width of an input."""
        if isinstance(self.resize, tuple):
            return self.resize[0], self.resize[1]
        return (self.crop or self.resize,) * 2

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing; the long side is rounded down, as torchvision does."""
        if isinstance(self.resize, tuple):
            return self.resize[1], self.resize[0]
        if width <= height:
            return self.resize, int(self.resize * height / width)
        return int(self.resize * width / height), self.resize

    def needed_size(self, width: int, height: int) -> tuple[int, int]:
        """Twice the size of the resized image: shrinking to it in the decoder hardly changes the result."""
        across, down = self.resized(width, height)
        return 2 * across, 2 * down

    def __call__(self, image: Image.Image) -> NDArray[np.float32]:
        """Turn an image in mode RGB into one float32 input."""
        if len(self.mean) == 1:
            image = image.convert("L")
        pixels = np.atleast_3d(np.asarray(self.crop_of(image)))
        # (x / 255 - mean) / std as one multiplication and one subtraction.
        std = np.asarray(self.std, np.float32)
        factor, offset = np.float32(1 / 255) / std, np.asarray(self.mean, np.float32) / std
        if not self.channels_last:
            pixels = pixels.transpose(2, 0, 1)
            factor, offset = factor[:, None, None], offset[:, None, None]
        scaled: NDArray[np.float32] = np.multiply(pixels, factor, dtype=np.float32, order="C")
        scaled -= offset
        return scaled

    def crop_of(self, image: Image.Image) -> Image.Image:
        """Resize the short side and crop the square in the centre, or resize to height and width."""
        width, height = self.resized(image.width, image.height)
        if self.crop is None:
            return image.resize((width, height), self.interpolation)
        left, top = round((width - self.crop) / 2), round((height - self.crop) / 2)
        if min(left, top) >= 0:
            # Only the pixels inside the crop are computed; the filter still reads their neighbours.
            across, down = image.width / width, image.height / height
            box = (left * across, top * down, (left + self.crop) * across, (top + self.crop) * down)
            return image.resize((self.crop, self.crop), self.interpolation, box=box)
        cropped = Image.new(image.mode, (self.crop, self.crop))
        cropped.paste(image.resize((width, height), self.interpolation), (-left, -top))
        return cropped
