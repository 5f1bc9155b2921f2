"""Reads headers of `.npy` arrays, of uploads and of request bodies; no pickle, no unchecked size."""

from __future__ import annotations

import math
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

MAX_HEADER_BYTES = 10_000
MAX_DIMENSIONS = 32
MAX_SIZE = 2**48
READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


class Header(NamedTuple):
    """The header of an array, and where its numbers begin in its file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran_order: bool
    offset: int

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def array(self, content: Any) -> NDArray[Any]:
        """View a buffer, at whose beginning the numbers are, as the array."""
        order: Literal["F", "C"] = "F" if self.fortran_order else "C"
        flat = np.frombuffer(content, self.dtype, math.prod(self.shape))
        return flat.reshape(self.shape, order=order)


def read_header(file: IO[bytes], length: int) -> Header:
    """Read the header of an array in a `.npy` file of `length` bytes, which must hold just the array.

    The messages continue the name of the array.
    """
    try:
        version = npy.read_magic(file)
        if version not in READERS:
            raise ValueError(f"it is in .npy format {version}; (1, 0) and (2, 0) are read")
        shape, fortran_order, dtype = READERS[version](file, max_header_size=MAX_HEADER_BYTES)
    except Exception as error:  # numpy lets errors of the tokenizer and of its own indexing through
        raise ValueError(f"is no readable .npy array: {error}"[:300]) from error
    if dtype.hasobject:
        raise ValueError(
            f"holds pickled Python objects (dtype {dtype}); they are never unpickled. Save it as an array of "
            "numbers"
        )
    if not dtype.itemsize:
        raise ValueError(f"must hold real numbers, got the dtype {dtype}")
    header = Header(shape, dtype, fortran_order, file.tell())
    is_shape = len(shape) <= MAX_DIMENSIONS and all(
        type(size) is int and 0 <= size <= MAX_SIZE for size in shape
    )
    if not is_shape or header.offset + header.bytes != length:
        announced = f"{header.bytes:,} bytes of {dtype} in " if is_shape else ""
        raise ValueError(
            f"announces {announced}the shape {shape!s:.100}, but {length - header.offset:,} are there"
        )
    return header
