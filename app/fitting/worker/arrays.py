"""Reads validation data that are named arrays, `.npz` and `.npy` parts of a form, and checks their shapes.

No pickle is read, and no array of another size than its header and the archive's directory announce.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np

from boxcal.app.fitting.model_inputs import FEATURES, TEXTS, ModelInputs, either_of, naming_samples
from boxcal.app.fitting.worker.archives import DAMAGE
from boxcal.app.fitting.worker.form import FilePart
from boxcal.app.fitting.worker.labels import check_shape
from boxcal.app.fitting.worker.validation_set import (
    GROUPS,
    SAMPLE_WEIGHT,
    Array,
    Batch,
    Expected,
    check_count,
    check_size,
    keep_set,
    refuse_weights,
    stored_dtype,
)
from boxcal.app.http.problems import InvalidUpload
from boxcal.app.settings.nearest import hint

SCORES = ("logits", "probabilities")
NAMES = (*SCORES, "labels", FEATURES, TEXTS, GROUPS, SAMPLE_WEIGHT)
BLOCK_BYTES = 8 * 2**20
MAX_MEMBERS = 1000
MAX_HEADER_BYTES = 10_000
KINDS = {"labels": "iufUS", GROUPS: "iufUS", "probabilities": "f"}
"""Kinds of dtypes that an array may have; others may have real numbers."""


class Header(NamedTuple):
    """The header of an array, and where its numbers begin in its file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool
    offset: int

    @property
    def bytes(self) -> int:
        """Size of the numbers."""
        return self.dtype.itemsize * math.prod(self.shape)

    def array(self, content: Any) -> Array:
        """Return the array whose numbers are in a buffer."""
        order: Literal["F", "C"] = "F" if self.fortran_order else "C"
        return np.frombuffer(content, self.dtype).reshape(self.shape, order=order)


def read_npz(archive: zipfile.ZipFile, folder: Path, expected: Expected) -> None:
    """Check the arrays of an archive and keep them in `folder`.

    Raises
    ------
    InvalidUpload, UploadTooLarge
        Names the array, the place and the value that cannot be accepted.
    """
    entries = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
    if len(entries) > MAX_MEMBERS:
        raise InvalidUpload(f"The archive has {len(entries)} arrays; the limit is {MAX_MEMBERS}.")
    files = {entry.filename.removesuffix(".npy"): entry for entry in entries}
    if len(files) < len(entries):
        raise InvalidUpload("The archive holds two arrays of the same name.")
    chosen = choose("The .npz", files, expected.inputs)
    headers = {}
    for name in chosen:
        with _naming_damage(name), archive.open(files[name]) as file:
            headers[name] = _header(file, files[name].file_size, name)
    check_arrays(headers, chosen[0], expected)
    arrays = {}
    for name, header in headers.items():
        with _naming_damage(name), archive.open(files[name]) as file:
            arrays[name] = _unpacked(file, header, name)
    keep_arrays(folder, arrays, chosen[0], expected)


def read_npy(parts: Mapping[str, FilePart], folder: Path, expected: Expected) -> None:
    """Check arrays that are `.npy` files of their own, by name, and keep them in `folder`.

    The errors are those of `read_npz`.
    """
    chosen = choose("The form", parts, expected.inputs)
    headers = {name: _header(io.BufferedReader(parts[name]), parts[name].length, name) for name in chosen}
    check_arrays(headers, chosen[0], expected)
    arrays = {}
    for name, header in headers.items():
        place = parts[name].start + header.offset
        arrays[name] = header.array(np.memmap(parts[name].path, np.uint8, "r", place, (header.bytes,)))
    keep_arrays(folder, arrays, chosen[0], expected)


def choose(place: str, there: Collection[str], inputs: ModelInputs | None) -> list[str]:
    """Choose the arrays to read; the first is that of the scores or samples.

    Raises
    ------
    InvalidUpload
        Naming the array that is missing or unknown.
    """
    refuse_weights(list(there))
    found = [name for name in SCORES if name in there]
    if inputs is not None and inputs.check_member(list(there)):
        found = [inputs.member]
    if TEXTS in there and TEXTS not in found:
        raise InvalidUpload(f"{place} has a member 'texts', which this model does not read.")
    for name in there:
        if name not in NAMES and (found or place == "The document"):
            raise InvalidUpload(
                f"{place} has a member {name!r:.100}{hint(name, NAMES)}; it may have "
                f"{', '.join(f'`{each}`' for each in NAMES)}."
            )
    if not found or "labels" not in there:
        shown = ", ".join(f"`{name:.100}`" for name in sorted(there)[:20]) or "no arrays"
        raise InvalidUpload(f"{place} needs `labels` and {either_of(inputs)}; it holds {shown}.")
    if len(found) > 1:
        raise InvalidUpload(f"{place} holds both `logits` and `probabilities`; send the one to be fitted.")
    others = [name for name in (FEATURES, GROUPS, SAMPLE_WEIGHT) if name in there and name not in found]
    return [found[0], "labels", *others]


def check_arrays(
    headers: Mapping[str, Header],
    member: str,
    expected: Expected,
) -> None:
    """Refuse arrays of other kinds, shapes and sizes before any is read."""
    inputs, classes = expected.inputs, expected.classes
    for name, header in headers.items():
        _check_kind(name, header.dtype)
    shapes = {name: header.shape for name, header in headers.items()}
    check_shape(shapes["labels"])
    count = shapes["labels"][0]
    if inputs is not None and member == inputs.member:
        _check_samples(inputs, shapes[member], count)
    else:
        check_rows(member, shapes[member], count, None if classes is None else len(classes))
    check_beside(shapes, count)
    sizes = {}
    for name, header in headers.items():
        kept = np.dtype(np.int64) if name in ("labels", GROUPS) else stored_dtype(header.dtype)
        sizes[name] = math.prod(header.shape) * max(header.dtype.itemsize, kept.itemsize)
    check_size(sizes, expected.max_bytes)


def check_rows(name: str, shape: tuple[int, ...], count: int, num_classes: int | None) -> None:
    """Refuse scores that are no validation set of this backbone."""
    if len(shape) != 2:
        raise InvalidUpload(f"`{name}` must have the shape (N, {num_classes or 'K'}), got {shape}.")
    if num_classes is not None and shape[1] != num_classes:
        raise InvalidUpload(
            f"`{name}` has {shape[1]} columns; the backbone served here has {num_classes} classes."
        )
    if shape[0] != count:
        raise InvalidUpload(f"`{name}` has {shape[0]} rows but `labels` has {count} values.")
    check_count(count)


def _check_samples(inputs: ModelInputs, shape: tuple[int, ...], count: int) -> None:
    if inputs.member == TEXTS or any(column.is_text for column in inputs.columns):
        raise InvalidUpload(f"{inputs.model} reads strings; send JSON, CSV, Arrow or Parquet.")
    expected = (count, len(inputs.names))
    if shape != expected:
        raise InvalidUpload(
            f"`features` has the shape {shape}; {inputs.model} reads {expected[1]} features and `labels` has "
            f"{count} values, so it must have {expected}."
        )


def check_beside(shapes: Mapping[str, tuple[int, ...]], count: int) -> None:
    """Refuse features, groups and weights that are not of the samples."""
    for name in (GROUPS, SAMPLE_WEIGHT):
        if name in shapes and shapes[name] not in {(count,), (count, 1)}:
            raise InvalidUpload(f"`{name}` must have the shape ({count},), got {shapes[name]}.")
    features = shapes.get(FEATURES, (count, 1))
    if len(features) != 2 or features[0] != count or features[1] < 1:
        raise InvalidUpload(f"`features` must have the shape ({count}, D), got {features}.")


def _check_kind(name: str, dtype: np.dtype[Any]) -> None:
    """Refuse an array that does not hold what its name says."""
    if dtype.kind not in KINDS.get(name, "fiu") or not dtype.itemsize:
        wanted = {"labels": "class indices or names", GROUPS: "numbers or texts"}.get(name, "real numbers")
        raise InvalidUpload(f"`{name}` must hold {wanted}, got the dtype {dtype}.")


def keep_arrays(
    folder: Path,
    arrays: Mapping[str, Array],
    member: str,
    expected: Expected,
    *,
    are_samples: bool = False,
) -> None:
    """Keep arrays in blocks of rows; rows of features are converted to samples, unless they are."""
    inputs = expected.inputs

    def batches() -> Iterator[Batch]:
        width = max(one[:1].nbytes for one in arrays.values())
        size = max(1, BLOCK_BYTES // max(1, width))
        flat = ("labels", GROUPS, SAMPLE_WEIGHT)
        for first in range(0, len(arrays["labels"]), size):
            batch = {
                name: one[first : first + size].ravel() if name in flat else one[first : first + size]
                for name, one in arrays.items()
            }
            if inputs is not None and member == inputs.member and not are_samples:
                columns = [*batch[member].astype(np.float64).T]
                batch[member] = inputs.rows.of_columns(columns, first, FEATURES)
            yield batch

    with naming_samples():
        keep_set(folder, batches(), member, expected)


@contextmanager
def _naming_damage(name: str) -> Iterator[None]:
    """Convert errors of a damaged archive to `InvalidUpload`."""
    try:
        yield
    except DAMAGE as error:
        raise InvalidUpload(f"`{name}` is damaged: {error}.") from error


def _header(file: IO[bytes], length: int, name: str) -> Header:
    """Read the header of an array in a `.npy` file of `length` bytes."""
    try:
        version = np.lib.format.read_magic(file)
        if version not in {(1, 0), (2, 0)}:
            raise ValueError(f"it is in .npy format {version}; (1, 0) and (2, 0) are read")
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, fortran_order, dtype = read(file, max_header_size=MAX_HEADER_BYTES)
        header = Header(shape, dtype, fortran_order, file.tell())
    except Exception as error:  # numpy lets errors of the tokenizer and of its own indexing through
        raise InvalidUpload(f"`{name}` is no readable .npy array: {error}"[:500]) from error
    if dtype.hasobject:
        raise InvalidUpload(
            f"`{name}` holds pickled Python objects (dtype {dtype}); they are never unpickled. "
            "Save it as an array of numbers."
        )
    _check_kind(name, dtype)
    if min(shape, default=0) < 0 or header.offset + header.bytes != length:
        raise InvalidUpload(
            f"`{name}` announces {header.bytes:,} bytes of {dtype} in the shape {shape}, "
            f"but {length - header.offset:,} are there."
        )
    return header


def _unpacked(file: IO[bytes], header: Header, name: str) -> Array:
    file.read(header.offset)
    content = file.read(header.bytes)
    # The checksum is compared only when the end is read.
    if len(content) < header.bytes or file.read(1):
        raise InvalidUpload(f"`{name}` has another size than its header announces.")
    return header.array(content)
