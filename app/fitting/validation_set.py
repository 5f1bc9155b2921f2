"""A checked validation set in a folder of its own: what an upload becomes, and what its fit reads.

The arrays lie in plain `.npy` files and are read and checked in blocks of rows, so an upload of any size
leaves the service's memory as it was, and the fit's process opens them without a copy passing through a pipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boxcal.app.fitting.errors import InvalidUpload

MIN_SAMPLES = 20
BLOCK_BYTES = 8 * 2**20
ROW_SUM_TOLERANCE = 1e-3  # float16 rows of a thousand classes sum to 1 no better than this

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """N samples of K logits and one label each, all checked.

    Attributes
    ----------
    folder
        Holds `logits.npy` (N, K), float32 or float64, finite, and `labels.npy` (N,), int64, each 0 to K - 1;
        perhaps `features.npy` (N, D), what the backbone's last layer takes, and `inputs.npy` (N, ...), what
        the backbone takes.
    samples
        N.
    """

    folder: Path
    samples: int

    def arrays(self) -> tuple[Array, npt.NDArray[np.int64]]:
        """Logits (N, K) and labels (N,)."""
        logits = np.load(logits_path(self.folder), allow_pickle=False)
        labels = np.load(labels_path(self.folder), allow_pickle=False)
        return logits, labels

    def besides(self, name: str) -> Array | None:
        """`features` (N, D) or `inputs` (N, ...), mapped from the disk; None where there are none."""
        path = besides_path(self.folder, name)
        return np.load(path, mmap_mode="r", allow_pickle=False) if path.exists() else None


def besides_path(folder: Path, name: str) -> Path:
    """Where a set keeps what some methods read besides logits."""
    return folder / f"{name}.npy"


def logits_path(folder: Path) -> Path:
    """Where a set keeps its logits."""
    return folder / "logits.npy"


def labels_path(folder: Path) -> Path:
    """Where a set keeps its labels."""
    return folder / "labels.npy"


def create(
    folder: Path, logits: Array, labels: Array, *, num_classes: int, probabilities: bool
) -> ValidationSet:
    """Check arrays and write them into `folder`.

    Parameters
    ----------
    folder
        Exists and is this set's own.
    logits
        (N, K) real numbers, possibly mapped from a file: the upload's `logits` or `probabilities`.
    labels
        (N,) integers.
    num_classes
        K of the backbone that is served.
    probabilities
        Whether `logits` are probabilities, as the upload said; their logarithms are kept then.

    Raises
    ------
    InvalidUpload
        Names the array, the place and the value that cannot be accepted.
    """
    name = "probabilities" if probabilities else "logits"
    check_shapes(name, logits.shape, labels.shape, num_classes)
    _check_kinds(name, logits.dtype, labels.dtype)
    np.save(labels_path(folder), _checked_labels(labels, num_classes), allow_pickle=False)
    kept = np.lib.format.open_memmap(
        logits_path(folder),
        mode="w+",
        shape=logits.shape,
        dtype=np.float64 if logits.dtype.kind in "iu" or logits.dtype.itemsize > 4 else np.float32,
    )
    for first, block in _blocks(logits):
        _check_finite(name, block, first)
        kept[first : first + len(block)] = _logarithms(block, first) if probabilities else block
    kept.flush()
    return ValidationSet(folder, len(labels))


def keep_features(data: ValidationSet, features: Array) -> None:
    """Check features (N, D), possibly mapped from a file, and keep them beside the logits.

    Raises
    ------
    InvalidUpload
        Names the place and the value that cannot be accepted.
    """
    if features.ndim != 2 or features.shape[0] != data.samples or features.shape[1] == 0:
        raise InvalidUpload(f"`features` must have the shape ({data.samples}, D), got {features.shape}.")
    if features.dtype.kind not in "fiu":
        raise InvalidUpload(f"`features` must hold real numbers, got the dtype {features.dtype}.")
    for first, block in _blocks(features):
        _check_finite("features", block, first)
    wide = features.dtype.kind in "iu" or features.dtype.itemsize > 4
    kept = features.astype(np.float64 if wide else np.float32)
    np.save(besides_path(data.folder, "features"), kept, allow_pickle=False)


def check_shapes(name: str, scores: tuple[int, ...], labels: tuple[int, ...], num_classes: int) -> None:
    """Refuse shapes that are no validation set of this backbone, before anything large is read."""
    if len(scores) != 2:
        raise InvalidUpload(f"`{name}` must have the shape (N, {num_classes}), got {scores}.")
    if len(labels) != 1:
        raise InvalidUpload(f"`labels` must have the shape (N,), got {labels}.")
    if scores[1] != num_classes:
        raise InvalidUpload(
            f"`{name}` has {scores[1]} columns; the backbone served here has {num_classes} classes."
        )
    if scores[0] != labels[0]:
        raise InvalidUpload(f"`{name}` has {scores[0]} rows but `labels` has {labels[0]} values.")
    if scores[0] < MIN_SAMPLES:
        raise InvalidUpload(
            f"The validation set has {scores[0]} samples; a fit that is judged on unseen folds "
            f"needs at least {MIN_SAMPLES}."
        )


def _check_kinds(name: str, scores: np.dtype[Any], labels: np.dtype[Any]) -> None:
    if scores.kind not in ("f" if name == "probabilities" else "fiu"):
        raise InvalidUpload(f"`{name}` must hold real numbers, got the dtype {scores}.")
    if labels.kind not in "iu":
        raise InvalidUpload(f"`labels` must hold integers (class indices), got the dtype {labels}.")


def _checked_labels(labels: Array, num_classes: int) -> npt.NDArray[np.int64]:
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if wrong.size:
        row = int(wrong[0])
        raise InvalidUpload(
            f"labels[{row}] is {labels[row]}; class indices go from 0 to {num_classes - 1}"
            f"{_others(wrong.size - 1, 'label')}."
        )
    return labels.astype(np.int64)


def _blocks(array: Array) -> Iterator[tuple[int, Array]]:
    rows = max(1, BLOCK_BYTES // max(1, array.itemsize * array.shape[1]))
    for first in range(0, len(array), rows):
        yield first, np.asarray(array[first : first + rows])


def _check_finite(name: str, block: Array, first: int) -> None:
    if np.isfinite(block).all():
        return
    wrong = np.argwhere(~np.isfinite(block))
    row, column = (int(index) for index in wrong[0])
    raise InvalidUpload(
        f"{name}[{first + row}, {column}] is {block[row, column]}; every value must be finite."
    )


def _logarithms(block: Array, first: int) -> Array:
    """Logarithms of probabilities; an exact 0 counts as the smallest number its dtype can tell from 0."""
    wrong = np.argwhere((block < 0) | (block > 1))
    if wrong.size:
        row, column = (int(index) for index in wrong[0])
        raise InvalidUpload(
            f"probabilities[{first + row}, {column}] is {block[row, column]}; "
            "a probability lies between 0 and 1. Send scores of another kind as `logits`."
        )
    sums = block.sum(axis=1, dtype=np.float64)
    off = np.flatnonzero(np.abs(sums - 1) > ROW_SUM_TOLERANCE)
    if off.size:
        row = int(off[0])
        raise InvalidUpload(
            f"probabilities[{first + row}] sums to {sums[row]:.6g}; the probabilities of a sample sum to 1."
        )
    logarithms: Array = np.log(np.maximum(block, np.finfo(block.dtype).tiny), dtype=np.float64)
    return logarithms


def _others(count: int, noun: str) -> str:
    return "" if count == 0 else f" ({count} more {noun}{'s' if count > 1 else ''} out of range)"
