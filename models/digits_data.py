"""The handwritten digits of scikit-learn, always split in the same way, and the form that `digits` reads."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

GREY_LEVELS = 16
DIGIT_SIDE = 8
LABELS = tuple("0123456789")
LARGEST_SQUARE = 128 * DIGIT_SIDE
TRAIN, VALIDATION = 719, 539  # of 1797; the remaining 539 are the test split


@dataclass(frozen=True, slots=True)
class Digits:
    """Handwritten digits.

    Attributes
    ----------
    levels
        float32 (N, 1, 8, 8), integers from 0 (black) to 16 (white): the backbone's inputs.
    labels
        int64 (N,), 0 to 9.
    """

    levels: NDArray[np.float32]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Digit `index` as an 8 × 8 grey image, white on black."""
        return Image.fromarray(np.rint(self.levels[index, 0] * (255 / GREY_LEVELS)).astype(np.uint8))

    def png(self, index: int) -> bytes:
        encoded = io.BytesIO()
        self.image(index).save(encoded, format="PNG")
        return encoded.getvalue()


@dataclass(frozen=True, slots=True)
class DigitsSplit:
    """The three parts; the backbone was trained on `train` alone."""

    train: Digits
    validation: Digits
    test: Digits


@dataclass(frozen=True, slots=True)
class DigitLevels:
    """Turn an image into the form of scikit-learn's digits: 8 × 8, white on black, integers 0 to 16.

    The data set counts the inked pixels of 4 × 4 blocks; averaging areas and rounding does the same.
    """

    @property
    def background(self) -> int:
        """Black: the digits are white."""
        return 0

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """One grey channel, height, width."""
        return (1, DIGIT_SIDE, DIGIT_SIDE)

    def needed_size(self, width: int, height: int) -> tuple[int, int]:
        """Eight pixels per side of each averaged block are enough."""
        side = 8 * DIGIT_SIDE
        return side, side

    def __call__(self, image: Image.Image) -> NDArray[np.float32]:
        """Turn an image in mode RGB into float32 (1, 8, 8), integers 0 to 16."""
        grey = image.convert("L")
        if grey.width != grey.height:
            # Averaged first where it is large: the square has the area of the longer side.
            grey = grey.reduce(max(1, max(grey.size) // LARGEST_SQUARE))
            side = max(grey.size)
            square = Image.new("L", (side, side), self.background)
            square.paste(grey, ((side - grey.width) // 2, (side - grey.height) // 2))
            grey = square
        if grey.width != DIGIT_SIDE:
            grey = grey.resize((DIGIT_SIDE, DIGIT_SIDE), Image.Resampling.BOX)
        levels: NDArray[np.float32] = np.asarray(grey, np.float32)[None] * np.float32(GREY_LEVELS / 255)
        return levels.round()


def load_digits_split() -> DigitsSplit:
    """Split scikit-learn's 1797 digits into 719 for training, 539 for validation and 539 for the test.

    References
    ----------
    E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Repository, 1998.
    """
    from sklearn.datasets import load_digits  # noqa: PLC0415 - takes a second; the service does not need it

    data = load_digits()
    levels = data.images.astype(np.float32)[:, None]
    labels = data.target.astype(np.int64)
    # RandomState's stream never changes, unlike that of numpy's newer generators.
    order = np.random.RandomState(0).permutation(len(labels))
    parts = np.split(order, [TRAIN, TRAIN + VALIDATION])
    return DigitsSplit(*(Digits(levels[part], labels[part]) for part in parts))
