"""Reads an uploaded `.npz`, or `.npy` files, without trusting them: no pickle, no more bytes than announced.

An `.npz` is a zip archive of `.npy` files. Each array is judged by its header and the archive's directory,
and only then unpacked, in pieces, onto the disk.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from boxcal.app.fitting.model_inputs import FEATURES, TEXTS, ModelInputs, either_of, naming_samples
from boxcal.app.fitting.worker.archives import DAMAGE
from boxcal.app.fitting.worker.form import FilePart
from boxcal.app.fitting.worker.labels import as_indices, check_shape
from boxcal.app.fitting.worker.validation_set import (
    GROUPS,
    SAMPLE_WEIGHT,
    Array,
    blocks_of,
    check_kind,
    check_shapes,
    check_size,
    keep,
    keep_groups,
    keep_labels,
    keep_weights,
    refuse_weights,
    stored_dtype,
)
from boxcal.app.http.problems import InvalidUpload
from boxcal.app.settings.nearest import hint

NAMES = ("logits", "probabilities", "labels", FEATURES, GROUPS, SAMPLE_WEIGHT)
COPY_BYTES = 2**20
MAX_MEMBERS = 1000
MAX_HEADER_BYTES = 10_000


@dataclass(frozen=True, slots=True)
class Member:
    """One array of the archive, known by its header.

    Attributes
    ----------
    bytes
        Size of the array.
    offset
        Where in the unpacked member the numbers begin.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool
    bytes: int
    offset: int

    @property
    def stored_bytes(self) -> int:
        """Size of the array, or of what it is converted to where that is larger."""
        kept = np.dtype(np.int64) if self.name == "labels" else stored_dtype(self.dtype)
        return max(self.bytes, self.bytes // self.dtype.itemsize * kept.itemsize)


def read_npz(
    archive: zipfile.ZipFile,
    folder: Path,
    *,
    classes: Sequence[str] | None,
    max_bytes: int,
    inputs: ModelInputs | None = None,
) -> None:
    """Check the arrays of an archive and keep them in `folder`.

    Parameters
    ----------
    classes
        The K class names of the backbone; None to accept any K.
    max_bytes
        How large the arrays may be, unpacked and converted, all together.
    inputs
        Of a model of features, which may be sent in place of logits.

    Raises
    ------
    InvalidUpload, UploadTooLarge
        Names the array, the place and the value that cannot be accepted.
    """
    entries = _entries(archive)
    names = _names("The .npz", entries, inputs)
    members = {each: _header(archive, entries[each], each) for each in names}
    raw = folder / "array.raw"
    try:
        _keep(
            folder,
            members,
            lambda name: _unpack(archive, entries[name], members[name], raw),
            classes=classes,
            max_bytes=max_bytes,
            inputs=inputs,
        )
    finally:
        raw.unlink(missing_ok=True)


def read_npy(
    files: Mapping[str, FilePart],
    folder: Path,
    *,
    classes: Sequence[str] | None,
    max_bytes: int,
    inputs: ModelInputs | None = None,
) -> None:
    """Check arrays that are `.npy` files of their own, by name, and keep them in `folder`.

    Parameters and errors are those of `read_npz`.
    """
    names = _names("The form", files, inputs)
    members = {}
    for name in names:
        members[name] = _member(io.BufferedReader(files[name]), files[name].length, name)

    def mapped(name: str) -> Array:
        file, member = files[name], members[name]
        flat = np.memmap(file.path, member.dtype, "r", file.start + member.offset, (_size(member.shape),))
        return flat.reshape(member.shape, order="F" if member.fortran_order else "C")

    _keep(folder, members, mapped, classes=classes, max_bytes=max_bytes, inputs=inputs)


def _names(place: str, there: Collection[str], inputs: ModelInputs | None) -> list[str]:
    """Choose the arrays to read.

    Raises
    ------
    InvalidUpload
        Naming the array that is missing or unknown.
    """
    found = [name for name in ("logits", "probabilities") if name in there]
    if inputs is not None and inputs.check_member(list(there)):
        found = [inputs.member]
    if TEXTS in found:
        raise InvalidUpload(f"{place} holds `texts`; send them as JSON, CSV, Arrow or Parquet.")
    if not found or "labels" not in there:
        shown = ", ".join(f"`{name:.100}`" for name in sorted(there)[:20]) or "no arrays"
        raise InvalidUpload(f"{place} needs `labels` and {either_of(inputs)}; it holds {shown}.")
    if len(found) > 1:
        raise InvalidUpload(f"{place} holds both `logits` and `probabilities`; send the one to be fitted.")
    refuse_weights(list(there))
    for name in there:
        if name not in NAMES:
            raise InvalidUpload(
                f"{place} holds the array {name!r:.100}, which nothing reads{hint(name, NAMES)}; it may hold "
                f"{', '.join(f'`{each}`' for each in NAMES)}."
            )
    others = [name for name in (FEATURES, GROUPS, SAMPLE_WEIGHT) if name in there and name not in found]
    return [found[0], "labels", *others]


def _keep(
    folder: Path,
    members: Mapping[str, Member],
    array_of: Callable[[str], Array],
    *,
    classes: Sequence[str] | None,
    max_bytes: int,
    inputs: ModelInputs | None,
) -> None:
    name = next(iter(members))
    labels = members["labels"].shape
    check_shape(labels)
    if name == FEATURES and inputs is not None:
        _check_features(inputs, members[name], labels[0])
        classes, columns = inputs.labels, len(inputs.labels)
    else:
        check_shapes(name, members[name].shape, labels, None if classes is None else len(classes))
        columns = members[name].shape[1]
    samples = labels[0]
    if FEATURES in members and _is_no_matrix(members[FEATURES].shape, samples):
        raise InvalidUpload(f"`features` must have the shape ({samples}, D), got {members[FEATURES].shape}.")
    check_size({each: member.stored_bytes for each, member in members.items()}, max_bytes)
    keep_labels(folder, as_indices(np.array(array_of("labels")).ravel(), classes), columns)
    if GROUPS in members:
        keep_groups(folder, np.array(array_of(GROUPS)), samples)
    if SAMPLE_WEIGHT in members:
        keep_weights(folder, np.array(array_of(SAMPLE_WEIGHT)), samples)
    for each in members:
        if each == name == FEATURES and inputs is not None:
            _keep_features(folder, inputs, array_of(each), max_bytes)
        elif each not in ("labels", GROUPS, SAMPLE_WEIGHT):
            array = array_of(each)
            keep(folder, each, (samples, array.shape[1]), array.dtype, blocks_of(array))


def _check_features(inputs: ModelInputs, member: Member, samples: int) -> None:
    expected = (samples, len(inputs.names))
    if any(column.is_text for column in inputs.columns):
        raise InvalidUpload(f"{inputs.model} has features that are strings; send JSON, CSV or Parquet.")
    if member.shape != expected:
        raise InvalidUpload(
            f"`features` has the shape {member.shape}; {inputs.model} reads {expected[1]} features and "
            f"`labels` has {samples} values, so it must have {expected}."
        )


def _keep_features(folder: Path, inputs: ModelInputs, array: Array, max_bytes: int) -> None:
    """Check rows of features (N, D), and keep them for the model."""
    from boxcal.app.fitting.worker.samples import keep_samples  # noqa: PLC0415 - pyarrow takes long to load

    def checked() -> Iterator[Array]:
        first, rows = 0, inputs.rows
        for block in blocks_of(array):
            yield rows.of_columns([*block.astype(np.float64).T], first, FEATURES)
            first += len(block)

    with naming_samples():
        keep_samples(folder, inputs, checked(), max_bytes)


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _entries(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Entries by the names of their arrays."""
    entries = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
    if len(entries) > MAX_MEMBERS:
        raise InvalidUpload(f"The archive has {len(entries)} arrays; the limit is {MAX_MEMBERS}.")
    by_name = {entry.filename.removesuffix(".npy"): entry for entry in entries}
    if len(by_name) < len(entries):
        raise InvalidUpload("The archive holds two arrays of the same name.")
    return by_name


def _is_no_matrix(shape: tuple[int, ...], samples: int) -> bool:
    return len(shape) != 2 or shape[0] != samples or shape[1] < 1


def _header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str) -> Member:
    try:
        with archive.open(entry) as packed:
            return _member(packed, entry.file_size, name)
    except DAMAGE as error:
        raise InvalidUpload(f"`{name}` is no readable .npy array: {error}"[:500]) from error


def _member(file: IO[bytes], length: int, name: str) -> Member:
    """Read the header of an array in a `.npy` file of `length` bytes."""
    try:
        version = np.lib.format.read_magic(file)
        if version not in {(1, 0), (2, 0)}:
            raise ValueError(f"it is in .npy format {version}; (1, 0) and (2, 0) are read")
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, fortran_order, dtype = read(file, max_header_size=MAX_HEADER_BYTES)
        offset = file.tell()
    except Exception as error:  # numpy lets errors of the tokenizer and of its own indexing through
        raise InvalidUpload(f"`{name}` is no readable .npy array: {error}"[:500]) from error
    if dtype.hasobject:
        raise InvalidUpload(
            f"`{name}` holds pickled Python objects (dtype {dtype}); they are never unpickled. "
            "Save it as an array of numbers."
        )
    check_kind(name, dtype)
    size = dtype.itemsize * _size(shape)
    if min(shape, default=0) < 0 or offset + size != length:
        raise InvalidUpload(
            f"`{name}` announces {size:,} bytes of {dtype} in the shape {shape}, "
            f"but {length - offset:,} are there."
        )
    return Member(name, shape, dtype, fortran_order, size, offset)


def _unpack(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, member: Member, path: Path) -> Array:
    """Unpack one array to `path` and map it."""
    try:
        with archive.open(entry) as packed, path.open("wb") as raw:
            packed.read(member.offset)
            left = member.bytes
            while left:
                piece = packed.read(min(left, COPY_BYTES))
                if not piece:
                    raise InvalidUpload(f"`{member.name}` ends {left} bytes early.")
                raw.write(piece)
                left -= len(piece)
            # The checksum is compared only when the end is read.
            if packed.read(1):
                raise InvalidUpload(f"`{member.name}` goes on after its last number.")
    except DAMAGE as error:
        raise InvalidUpload(f"`{member.name}` is damaged: {error}.") from error
    flat = np.memmap(path, dtype=member.dtype, mode="r")
    return flat.reshape(member.shape, order="F" if member.fortran_order else "C")
