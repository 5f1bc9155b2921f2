"""Labels of an upload, as class indices or as class names, in any type that holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from boxcal.app.http.problems import InvalidUpload
from boxcal.app.settings.nearest import hint

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]


def as_indices(labels: Array, classes: Sequence[str] | None, first: int = 0) -> Indices:
    """Turn labels (N,) into class indices; their range is not checked here.

    Parameters
    ----------
    labels
        Integers, floats with integer values, or class names.
    classes
        The class names; None where they are not known, and labels must be indices.
    first
        Number of the first label, for messages.

    Raises
    ------
    InvalidUpload
        Naming the label that is no class or no integer.
    """
    if labels.dtype.kind in "iu":
        return labels.astype(np.int64)
    if labels.dtype.kind == "f":
        return _whole(labels, first)
    names = labels.astype(str)
    index_of = {} if classes is None else {name: index for index, name in enumerate(classes)}
    distinct, inverse = np.unique(names, return_inverse=True)
    unknown = [str(name) for name in distinct if name not in index_of]
    if not unknown:
        return np.array([index_of[name] for name in distinct], np.int64)[inverse]
    try:  # text formats write indices as text
        return _whole(distinct.astype(np.float64), first)[inverse]
    except (ValueError, InvalidUpload):
        row = int(np.flatnonzero(names == unknown[0])[0])
        why = "the class names are not known here, so labels must be indices"
        if classes is not None:
            why = f"which is no class of the model{hint(unknown[0], classes)}"
        raise InvalidUpload(f"labels[{first + row}] is {unknown[0]!r:.200}, {why}.") from None


def check_shape(shape: tuple[int, ...]) -> None:
    """Accept labels of the shapes (N,) and (N, 1).

    Raises
    ------
    InvalidUpload
        They have another shape, such as that of a one-hot encoding.
    """
    if len(shape) == 2 and shape[1] > 1:
        raise InvalidUpload(
            f"`labels` has the shape {shape}, which looks like a one-hot encoding; send class indices (N,), "
            "such as labels.argmax(axis=1)."
        )
    if len(shape) != 1 and (len(shape) != 2 or shape[1] != 1):
        raise InvalidUpload(f"`labels` must have the shape (N,), got {shape}.")


def _whole(values: Array, first: int) -> Indices:
    """Convert floats that are integers."""
    wrong = ~(np.isfinite(values) & (np.abs(values) < 2**53) & (values == np.round(values)))
    if wrong.any():
        row = int(wrong.argmax())
        raise InvalidUpload(f"labels[{first + row}] is {values[row]}; class indices are integers.")
    return values.astype(np.int64)
