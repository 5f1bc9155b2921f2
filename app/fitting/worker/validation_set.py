"""A checked validation set in a folder of its own: what an upload becomes, and what its fit reads.

Arrays are plain `.npy` files. They are checked, converted and written in blocks of rows, so that memory does
not grow with the upload, and written by `write`, so that a full disk is an error and not a SIGBUS.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boxcal.app.http.problems import InvalidUpload, UploadTooLarge

LISTING = "images.json"
SAMPLES = "samples.arrow"
MIN_SAMPLES = 20
BLOCK_BYTES = 8 * 2**20
ROUNDING = 1e-3  # float16 rows of a thousand classes sum to 1 no better than this
ROW_SUM_TOLERANCE = 1e-2
NOTES = "notes.json"
UNKNOWN_ROWS = -1
"""In place of N where the number of rows is known only at the end."""
SAMPLE_WEIGHT = "sample_weight"
WEIGHTS = ("sample_weights", "weight", "weights")
GROUPS = "groups"
MIN_GROUPS = 2

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """N samples of K logits, or images, rows or texts, and one label each, all checked.

    Attributes
    ----------
    folder
        Holds `logits.npy` (N, K), float32 or float64, finite, and `labels.npy` (N,), int64, each 0 to K - 1;
        perhaps `features.npy` (N, D), what the backbone's last layer takes, and `inputs.npy` (N, ...), what
        the backbone takes, `groups.npy` (N,), int64, and `sample_weight.npy` (N,), float64. Until the fit has
        run the backbone, labelled images have `images.json`, which says where they are, and labelled rows and
        texts `samples.arrow`, in place of logits.
    """

    folder: Path

    @property
    def samples(self) -> int:
        """N."""
        return len(np.load(self.folder / "labels.npy", mmap_mode="r"))

    @property
    def holds_images(self) -> bool:
        """Whether it is made of images."""
        return (self.folder / LISTING).exists()

    @property
    def needs_backbone(self) -> bool:
        """Whether it is made of images, rows or texts, which only a backbone can turn into logits."""
        return self.holds_images or (self.folder / SAMPLES).exists()

    @property
    def notes(self) -> list[dict[str, Any]]:
        """Warnings that the check of the upload adds to those of the report."""
        path = self.folder / NOTES
        return list(json.loads(path.read_text())) if path.exists() else []

    def arrays(self) -> tuple[Array, npt.NDArray[np.int64]]:
        """Logits (N, K), mapped from the disk, and labels (N,)."""
        return np.load(self.folder / "logits.npy", mmap_mode="c"), np.load(self.folder / "labels.npy")

    def besides(self, name: str) -> Array | None:
        """`features` (N, D) or `inputs` (N, ...), mapped from the disk; None where there are none."""
        path = self.folder / f"{name}.npy"
        return np.load(path, mmap_mode="r") if path.exists() else None

    @property
    def grouping(self) -> dict[str, Any]:
        """The groups and weights of the samples, if there are any, as `boxcal.calibrators.fit` takes them."""
        named = {name: self.besides(name) for name in (GROUPS, SAMPLE_WEIGHT)}
        return {name: np.array(values) for name, values in named.items() if values is not None}


class ArrayWriter:
    """Writes an array `folder/name.npy` block by block; a context manager.

    Parameters
    ----------
    shape, dtype
        Of the whole array; the first size may be `UNKNOWN_ROWS`.
    """

    def __init__(self, folder: Path, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        self._dtype = np.dtype(dtype)
        self._file = (folder / f"{name}.npy").open("wb")
        self._shape, self._rows = shape, 0
        self._write_header(shape)

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shape[0] == UNKNOWN_ROWS:
            self._file.seek(0)
            self._write_header((self._rows, *self._shape[1:]))
        self._file.close()

    def _write_header(self, shape: tuple[int, ...]) -> None:
        """Write the header; numpy pads it so that its length does not depend on the first size."""
        header = {"descr": self._dtype.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)

    def append(self, block: Array) -> None:
        """Write the next rows."""
        self._rows += len(block)
        self._file.write(np.ascontiguousarray(block, dtype=self._dtype).data)


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Choose how real numbers are kept: float32 for floats of at most 32 bits, otherwise float64."""
    return np.dtype(np.float32 if dtype.kind == "f" and dtype.itemsize <= 4 else np.float64)


def keep(
    folder: Path, name: str, shape: tuple[int, int], dtype: np.dtype[Any], blocks: Iterable[Array]
) -> None:
    """Check rows of real numbers and write them into `folder` as `logits` or `features`.

    Parameters
    ----------
    name
        `logits`, `features`, or `probabilities`, whose logarithms are kept as `logits`.
    shape
        (N, K) or (N, D); N may be `UNKNOWN_ROWS`.
    dtype
        Of the blocks.
    blocks
        Together N rows.

    Raises
    ------
    InvalidUpload
        Names the array, the place and the value that cannot be accepted.
    """
    is_probabilities = name == "probabilities"
    kept, first, scaled = stored_dtype(dtype), 0, 0
    with ArrayWriter(folder, "logits" if is_probabilities else name, shape, kept) as out:
        for block in blocks:
            # Infinities of the conversion are found in its result.
            with np.errstate(over="ignore"):
                values = block.astype(kept)
            _check_finite(name, values, block, first)
            if is_probabilities:
                values, off = _logarithms(values, first)
                scaled += off
            out.append(values)
            first += len(block)
    if scaled:
        message = (
            f"the probabilities of {scaled:,} samples sum to 1 only within {ROW_SUM_TOLERANCE:g}; they were "
            "divided by their sums"
        )
        note = {"code": "probabilities_scaled", "severity": "warning", "message": message, "rows": scaled}
        (folder / NOTES).write_text(json.dumps([note]))
    if shape[0] not in (first, UNKNOWN_ROWS):
        raise InvalidUpload(f"`{name}` announces {shape[0]:,} rows, but {first:,} are there.")


def keep_labels(folder: Path, labels: Array, num_classes: int) -> None:
    """Check labels (N,), and write them into `folder`.

    Raises
    ------
    InvalidUpload
        Names the place and the value that cannot be accepted.
    """
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if wrong.size:
        row = int(wrong[0])
        raise InvalidUpload(
            f"labels[{row}] is {labels[row]}; class indices go from 0 to {num_classes - 1}"
            f"{_others(wrong.size - 1, 'label')}."
        )
    with ArrayWriter(folder, "labels", labels.shape, np.int64) as out:
        out.append(labels)


def keep_groups(folder: Path, groups: Array, samples: int) -> None:
    """Write the groups (N,), which may be numbers or texts, as numbers into `folder`.

    Raises
    ------
    InvalidUpload
        They have another shape, or all samples belong to one group.
    """
    if groups.shape not in {(samples,), (samples, 1)}:
        raise InvalidUpload(f"`groups` must have the shape ({samples},), got {groups.shape}.")
    names, numbers = np.unique(groups.ravel(), return_inverse=True)
    if len(names) < MIN_GROUPS:
        raise InvalidUpload(
            f"All samples belong to the group {names[0].item()!r:.100}; a fit is judged on groups that it "
            "has not seen."
        )
    with ArrayWriter(folder, GROUPS, numbers.shape, np.int64) as out:
        out.append(numbers)


def blocks_of(array: Array) -> Iterator[Array]:
    """Split rows (N, M) into blocks of about `BLOCK_BYTES`."""
    rows = max(1, BLOCK_BYTES // max(1, array.itemsize * array.shape[1]))
    for first in range(0, len(array), rows):
        yield np.asarray(array[first : first + rows])


def check_shapes(
    name: str, scores: tuple[int, ...], labels: tuple[int, ...], num_classes: int | None
) -> None:
    """Refuse shapes that are no validation set of this backbone, before anything large is read."""
    if len(scores) != 2:
        raise InvalidUpload(f"`{name}` must have the shape (N, {num_classes or 'K'}), got {scores}.")
    if num_classes is not None and scores[1] != num_classes:
        raise InvalidUpload(
            f"`{name}` has {scores[1]} columns; the backbone served here has {num_classes} classes."
        )
    if scores[0] != labels[0]:
        raise InvalidUpload(f"`{name}` has {scores[0]} rows but `labels` has {labels[0]} values.")
    check_count(scores[0])


def check_count(samples: int) -> None:
    """Refuse a validation set of fewer than `MIN_SAMPLES` samples."""
    if samples < MIN_SAMPLES:
        raise InvalidUpload(
            f"The validation set has {samples} sample{'' if samples == 1 else 's'}; a fit that is judged on "
            f"unseen folds needs at least {MIN_SAMPLES}."
        )


def check_kind(name: str, dtype: np.dtype[Any]) -> None:
    """Refuse arrays that do not hold numbers of the kind expected."""
    if name == "labels":
        if dtype.kind not in "iufUS" or not dtype.itemsize:
            raise InvalidUpload(f"`labels` must hold class indices or names, got the dtype {dtype}.")
    elif name == GROUPS:
        if dtype.kind not in "iufUS" or not dtype.itemsize:
            raise InvalidUpload(f"`groups` must hold numbers or texts, got the dtype {dtype}.")
    elif dtype.kind not in ("f" if name == "probabilities" else "fiu") or not dtype.itemsize:
        raise InvalidUpload(f"`{name}` must hold real numbers, got the dtype {dtype}.")


def check_size(sizes: dict[str, int], max_bytes: int) -> None:
    """Refuse arrays that would take more than `max_bytes` together; `sizes` are bytes by name."""
    total = sum(sizes.values())
    if total > max_bytes:
        names = ", ".join(f"`{name}`" for name in sizes)
        raise UploadTooLarge(f"The arrays {names} unpack to {total:,} bytes; the limit is {max_bytes:,}.")


def _check_finite(name: str, values: Array, sent: Array, first: int) -> None:
    if np.isfinite(values).all():
        return
    row, column = (int(index) for index in np.argwhere(~np.isfinite(values))[0])
    range_ = "" if not np.isfinite(sent[row, column]) else f" in {values.dtype}"
    raise InvalidUpload(
        f"{name}[{first + row}, {column}] is {sent[row, column]!s}; every value must be finite{range_}."
    )


def refuse_weights(names: Sequence[str]) -> None:
    """Refuse weights by another name than `sample_weight`, under which nothing would read them."""
    for name in names:
        if name.lower() in WEIGHTS:
            raise InvalidUpload(f"`{name}` is not read; send the weights of samples as `{SAMPLE_WEIGHT}`.")


def keep_weights(folder: Path, weights: Array, samples: int) -> None:
    """Check the weights (N,), and write them into `folder`.

    Raises
    ------
    InvalidUpload
        Names the place and the value that cannot be accepted.
    """
    if weights.shape not in {(samples,), (samples, 1)}:
        raise InvalidUpload(f"`{SAMPLE_WEIGHT}` must have the shape ({samples},), got {weights.shape}.")
    values = weights.ravel().astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if wrong.size:
        row = int(wrong[0])
        raise InvalidUpload(
            f"{SAMPLE_WEIGHT}[{row}] is {values[row]}; weights are finite and not negative"
            f"{_others(wrong.size - 1, 'weight')}."
        )
    if np.count_nonzero(values) < MIN_SAMPLES:
        raise InvalidUpload(
            f"`{SAMPLE_WEIGHT}` is above 0 for {np.count_nonzero(values)} samples; a fit needs at least "
            f"{MIN_SAMPLES}."
        )
    with ArrayWriter(folder, SAMPLE_WEIGHT, values.shape, np.float64) as out:
        out.append(values)


def log_probabilities(block: Array, first: int = 0) -> Array:
    """Return the logarithms of probabilities (n, K), the first row of which has the number `first`.

    Raises
    ------
    InvalidUpload
        Naming the row and the value that is no probability, or the sum that is not 1.
    """
    return _logarithms(block, first)[0]


def _logarithms(block: Array, first: int) -> tuple[Array, int]:
    """Logarithms of probabilities divided by their sums, and how many sums were off by more than rounding.

    An exact 0 counts as the smallest number that its dtype can tell from 0.
    """
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
    scaled = np.abs(sums - 1) > ROUNDING
    shares = np.where(scaled[:, None], block / sums[:, None], block)
    logarithms: Array = np.log(np.maximum(shares, np.finfo(block.dtype).tiny), dtype=np.float64)
    return logarithms, int(scaled.sum())


def _others(count: int, noun: str) -> str:
    return "" if count == 0 else f" ({count} more {noun}{'s' if count > 1 else ''} out of range)"
