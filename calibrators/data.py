"""The first step of every fit: validation logits and labels are checked and brought to float64 and int64."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from calibrators.errors import InvalidDataError

FEWEST_SAMPLES = 2


def as_array(values: Any, name: str) -> np.ndarray[Any, Any]:
    """Return a tensor, array or nested list as a numpy array, refusing what has no numbers in it."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        if values.dtype is torch.bfloat16:
            values = values.float()
        array: np.ndarray[Any, Any] = values.numpy()
        return array
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise InvalidDataError(f"{name} is not a rectangular array: {error}") from error
    if array.dtype.kind not in "fiub":
        raise InvalidDataError(f"{name} must hold numbers, not {array.dtype}")
    return array


def check_logits(logits: Any) -> Tensor:
    """Check that logits are a finite (N, K) matrix with K of at least 2; return them as float64.

    Raises
    ------
    InvalidDataError
        Naming the first offending row, column and value.
    """
    array = as_array(logits, "logits")
    if array.ndim != 2:
        raise InvalidDataError(f"logits must have shape (N, K), not {array.shape}")
    if array.shape[1] < 2:
        raise InvalidDataError(f"logits must have at least 2 classes, not K = {array.shape[1]}")
    finite = np.isfinite(array)
    if not finite.all():
        row, column = (int(i) for i in np.argwhere(~finite)[0])
        raise InvalidDataError(
            f"logits must be finite; row {row}, class {column} is {float(array[row, column])}"
            f" ({int((~finite).sum())} such values in all)"
        )
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))


def check_labels(labels: Any, num_samples: int, num_classes: int) -> Tensor:
    """Check that labels are N class indices below K; return them as int64.

    Raises
    ------
    InvalidDataError
        Naming the first offending row and value.
    """
    array = as_array(labels, "labels")
    if array.ndim != 1:
        raise InvalidDataError(f"labels must have shape (N,), not {array.shape}")
    if len(array) != num_samples:
        raise InvalidDataError(f"there are {num_samples} rows of logits but {len(array)} labels")
    whole = np.isfinite(array) & (array == np.floor(array)) if array.dtype.kind == "f" else True
    good = whole & (array >= 0) & (array < num_classes)
    if not np.all(good):
        row = int(np.argmin(good))
        raise InvalidDataError(
            f"labels must be class indices 0 to {num_classes - 1}; row {row} is {array[row].item()}"
        )
    return torch.from_numpy(array.astype(np.int64))


def check_validation_set(logits: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Check a validation set: finite logits (N, K) with N and K of at least 2, and N labels below K.

    Returns
    -------
    tuple of Tensor
        Logits in float64 and labels in int64, on the CPU.

    Raises
    ------
    InvalidDataError
        Saying which row or value is wrong.
    """
    scores = check_logits(logits)
    num_samples, num_classes = scores.shape
    if num_samples < FEWEST_SAMPLES:
        raise InvalidDataError(f"a fit needs at least {FEWEST_SAMPLES} samples, not N = {num_samples}")
    return scores, check_labels(labels, num_samples, num_classes)
