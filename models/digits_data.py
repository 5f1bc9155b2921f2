"""The handwritten digits that scikit-learn ships, always split in the same way."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from boxcal.models.inputs.images import GREY_LEVELS

LABELS = tuple("0123456789")
DATA = Path(__file__).with_name("digits_data.npz")
"""`load_digits` of scikit-learn in 45 kB: uint8 `levels` (N, 8, 8) and `labels` (N,)."""
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


def load_digits_split() -> DigitsSplit:
    """Split the 1797 digits into 719 for training, 539 for validation and 539 for the test.

    References
    ----------
    E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Repository, 1998 (CC BY 4.0).
    """
    with np.load(DATA) as data:
        levels, labels = data["levels"].astype(np.float32)[:, None], data["labels"].astype(np.int64)
    # RandomState's stream never changes, unlike that of numpy's newer generators.
    order = np.random.RandomState(0).permutation(len(labels))
    parts = np.split(order, [TRAIN, TRAIN + VALIDATION])
    return DigitsSplit(*(Digits(levels[part], labels[part]) for part in parts))
