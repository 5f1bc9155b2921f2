"""Validation sets for the tests: overconfident logits, and the files that an upload may bring."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[Any]
Labels = npt.NDArray[np.int64]


def overconfident(samples: int = 400, classes: int = 10, *, seed: int = 0) -> tuple[Floats, Labels]:
    """Logits (N, K) of a classifier that is four times as sure as it should be, and labels (N,)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, samples)
    logits = rng.normal(size=(samples, classes))
    logits[np.arange(samples), labels] += 1.5
    return (4 * logits).astype(np.float32), labels


def npz(**arrays: Any) -> bytes:
    """The arrays as an uncompressed `.npz`."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def validation_npz(samples: int = 400, classes: int = 10, *, seed: int = 0) -> bytes:
    """A good upload."""
    logits, labels = overconfident(samples, classes, seed=seed)
    return npz(logits=logits, labels=labels)
