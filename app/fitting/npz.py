"""Reads an uploaded `.npz` without trusting it: no pickle, no more bytes than announced, no bomb.

An `.npz` is a zip archive of `.npy` files. Each needed member is judged by its header and the archive's
directory alone, and only then unpacked, in pieces, onto the disk.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from boxcal.app.fitting.archives import open_archive
from boxcal.app.fitting.errors import InvalidUpload, UploadTooLarge

COPY_BYTES = 2**20
MAX_MEMBERS = 1000
MAX_HEADER_BYTES = 10_000


@dataclass(frozen=True, slots=True)
class Member:
    """One array of the archive, known by its header.

    Attributes
    ----------
    offset
        Where in the unpacked member the numbers begin.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool
    offset: int

    @property
    def bytes(self) -> int:
        """Size of the array."""
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


class NpzFile:
    """An uploaded archive.

    Parameters
    ----------
    file
        Seekable; not closed here.
    max_bytes
        How large the arrays may be, unpacked, all together.

    Raises
    ------
    InvalidUpload
        It is no readable zip archive.
    UploadTooLarge
        Its directory is too large.
    """

    def __init__(self, file: IO[bytes], max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._archive = open_archive(file, ".npz archive")
        entries = self._archive.infolist()
        if len(entries) > MAX_MEMBERS:
            raise InvalidUpload(f"The archive has {len(entries)} members; the limit is {MAX_MEMBERS}.")
        self._entries = {e.filename.removesuffix(".npy"): e for e in entries if e.filename.endswith(".npy")}
        if len(self._entries) < sum(e.filename.endswith(".npy") for e in entries):
            raise InvalidUpload("The archive holds two arrays of the same name.")

    @property
    def names(self) -> Collection[str]:
        """Names of the arrays."""
        return self._entries.keys()

    def headers(self, names: Collection[str]) -> dict[str, Member]:
        """Judge members by their headers.

        Raises
        ------
        InvalidUpload
            A member is damaged, holds Python objects, or its size contradicts its header.
        UploadTooLarge
            Together they would unpack to more bytes than the limit.
        """
        members = {name: self._header(name) for name in names}
        total = sum(member.bytes for member in members.values())
        if total > self._max_bytes:
            raise UploadTooLarge(
                f"The arrays {', '.join(f'`{name}`' for name in members)} would unpack to {total:,} bytes; "
                f"the limit is {self._max_bytes:,}."
            )
        return members

    def unpack(self, member: Member, path: Path) -> npt.NDArray[Any]:
        """Unpack one array to `path` and map it.

        Raises
        ------
        InvalidUpload
            The packed data are damaged.
        """
        try:
            with self._archive.open(self._entries[member.name]) as packed, path.open("wb") as raw:
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
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise InvalidUpload(f"`{member.name}` is damaged: {error}.") from error
        order: Literal["C", "F"] = "F" if member.fortran_order else "C"
        flat = np.memmap(path, dtype=member.dtype, mode="r")
        return flat.reshape(member.shape, order=order)

    def _header(self, name: str) -> Member:
        entry = self._entries[name]
        if entry.flag_bits & 0x1:
            raise InvalidUpload(f"`{name}` is encrypted.")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise InvalidUpload(
                f"`{name}` is packed with zip method {entry.compress_type}; "
                "numpy.savez and numpy.savez_compressed write methods 0 and 8."
            )
        try:
            with self._archive.open(entry) as packed:
                version = np.lib.format.read_magic(packed)
                if version == (1, 0):
                    found = np.lib.format.read_array_header_1_0(packed, max_header_size=MAX_HEADER_BYTES)
                elif version == (2, 0):
                    found = np.lib.format.read_array_header_2_0(packed, max_header_size=MAX_HEADER_BYTES)
                else:
                    raise InvalidUpload(f"`{name}` is in .npy format {version}; 1.0 and 2.0 are read.")
                shape, fortran_order, dtype = found
                offset = packed.tell()
        except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError) as error:
            raise InvalidUpload(f"`{name}` is no readable .npy array: {error}") from error
        if dtype.hasobject:
            raise InvalidUpload(
                f"`{name}` holds pickled Python objects (dtype {dtype}); they are never unpickled. "
                "Save it as an array of numbers."
            )
        member = Member(name, shape, dtype, fortran_order, offset)
        if offset + member.bytes != entry.file_size:
            raise InvalidUpload(
                f"`{name}` announces {member.bytes:,} bytes of {dtype} in the shape {shape}, "
                f"but {entry.file_size - offset:,} are there."
            )
        return member
