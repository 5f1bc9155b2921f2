"""Reads an uploaded `.npz` without trusting it: no pickle, and no more bytes than announced.

An `.npz` is a zip archive of `.npy` files. Each array is judged by its header and the archive's directory,
and only then unpacked, in pieces, onto the disk.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from boxcal.app.fitting.archives import DAMAGE
from boxcal.app.fitting.errors import InvalidUpload
from boxcal.app.fitting.validation_set import (
    Array,
    blocks_of,
    check_kind,
    check_shapes,
    check_size,
    keep,
    keep_labels,
    stored_dtype,
)

FEATURES = "features"
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


def read_npz(archive: zipfile.ZipFile, folder: Path, *, num_classes: int | None, max_bytes: int) -> None:
    """Check the arrays and keep them in `folder`.

    Parameters
    ----------
    num_classes
        K of the backbone; None to accept any.
    max_bytes
        How large the arrays may be, unpacked and converted, all together.

    Raises
    ------
    InvalidUpload, UploadTooLarge
        Names the array, the place and the value that cannot be accepted.
    """
    entries = _entries(archive)
    found = [name for name in ("logits", "probabilities") if name in entries]
    if not found or "labels" not in entries:
        there = ", ".join(f"`{name}`" for name in sorted(entries)[:20]) or "no arrays"
        raise InvalidUpload(
            f"The .npz needs `labels` and either `logits` or `probabilities`; it holds {there}."
        )
    if len(found) > 1:
        raise InvalidUpload("The .npz holds both `logits` and `probabilities`; send the one to be fitted.")
    (name,) = found
    names = [name, "labels", *([FEATURES] if FEATURES in entries else [])]
    members = {each: _header(archive, entries[each], each) for each in names}
    check_shapes(name, members[name].shape, members["labels"].shape, num_classes)
    samples, columns = members[name].shape
    if FEATURES in members and _is_no_matrix(members[FEATURES].shape, samples):
        raise InvalidUpload(f"`features` must have the shape ({samples}, D), got {members[FEATURES].shape}.")
    check_size({each: member.stored_bytes for each, member in members.items()}, max_bytes)
    raw = folder / "array.raw"
    try:
        keep_labels(folder, np.array(_unpack(archive, entries["labels"], members["labels"], raw)), columns)
        for each in names:
            if each != "labels":
                array = _unpack(archive, entries[each], members[each], raw)
                keep(folder, each, (samples, array.shape[1]), array.dtype, blocks_of(array))
    finally:
        raw.unlink(missing_ok=True)


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
            version = np.lib.format.read_magic(packed)
            if version not in {(1, 0), (2, 0)}:
                raise ValueError(f"it is in .npy format {version}; (1, 0) and (2, 0) are read")
            read = (
                np.lib.format.read_array_header_1_0
                if version == (1, 0)
                else np.lib.format.read_array_header_2_0
            )
            shape, fortran_order, dtype = read(packed, max_header_size=MAX_HEADER_BYTES)
            offset = packed.tell()
    except Exception as error:  # numpy lets errors of the tokenizer and of its own indexing through
        raise InvalidUpload(f"`{name}` is no readable .npy array: {error}"[:500]) from error
    if dtype.hasobject:
        raise InvalidUpload(
            f"`{name}` holds pickled Python objects (dtype {dtype}); they are never unpickled. "
            "Save it as an array of numbers."
        )
    check_kind(name, dtype)
    size = dtype.itemsize
    for length in shape:
        size *= length
    if offset + size != entry.file_size:
        raise InvalidUpload(
            f"`{name}` announces {size:,} bytes of {dtype} in the shape {shape}, "
            f"but {entry.file_size - offset:,} are there."
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
