"""Tensors of the Open Inference Protocol: JSON and binary data to arrays, and arrays to both.

Binary data are row-major and little-endian. An element of `BYTES` is its length, 4 bytes, and its content.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.app.http.problems import InvalidInput, MalformedBody

BYTES = "BYTES"
DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "BF16": np.dtype("V2"),  # the upper half of FP32; NumPy has no such type
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
}
REAL = "fV"
"""Kinds of the types whose numbers may be fractions, or missing."""
LENGTH = struct.Struct("<I")
MAX_DIMENSIONS = 32

Array = NDArray[Any]


def read_shape(name: str, shape: Any) -> tuple[int, ...]:
    if (
        not isinstance(shape, Sequence)
        or len(shape) > MAX_DIMENSIONS
        or not all(type(size) is int and size >= 1 for size in shape)
    ):
        raise InvalidInput(
            f"The input {name!r:.100} has the shape {shape!r:.100}; it must be a list of sizes from 1."
        )
    return tuple(shape)


def from_binary(name: str, datatype: str, shape: tuple[int, ...], data: bytes | memoryview) -> Array:
    """Read binary data as an array; `BYTES` become an array of bytes objects."""
    count = math.prod(shape)
    if datatype == BYTES:
        return _elements(name, memoryview(data), count).reshape(shape)
    dtype = _dtype(name, datatype)
    if len(data) != count * dtype.itemsize:
        raise MalformedBody(
            f"The input {name!r:.100} of the shape {list(shape)} and the type {datatype} has "
            f"{count * dtype.itemsize} bytes; {len(data)} were sent."
        )
    values = np.frombuffer(data, dtype, count)
    if dtype.kind == "b":
        _check_bools(name, values.view(np.uint8))
    if dtype.kind == "V":
        values = (values.view("<u2").astype("<u4") << 16).view("<f4")
    return values.reshape(shape)


def from_json(name: str, datatype: str, shape: tuple[int, ...], data: Any) -> Array:
    """Read nested or flat lists as an array; strings of `BYTES` become an array of str objects.

    `null` is NaN, a missing value.
    """
    count = math.prod(shape)
    # The types are checked first: NumPy pads strings to the longest of them.
    flat = _flat(name, shape, data)
    if datatype == BYTES:
        if len(flat) != count or not all(isinstance(one, str) for one in flat):
            raise InvalidInput(f"The input {name!r:.100} must have {count} strings, got {len(flat)} values.")
        strings = np.empty(count, object)
        strings[:] = flat
        return strings.reshape(shape)
    dtype = _dtype(name, datatype)
    others = {type(one) for one in flat} - {int, float, bool}
    if type(None) in others and dtype.kind in REAL:
        flat = [math.nan if one is None else one for one in flat]
        others.remove(type(None))
    if others or len(flat) != count:
        found = f"{len(flat)} values" + (f", one of the type {others.pop().__name__}" if others else "")
        raise InvalidInput(
            f"The input {name!r:.100} of the shape {list(shape)} must have {count} numbers, got {found}."
        )
    values = np.array(flat)
    if values.dtype.kind == "O":
        raise InvalidInput(f"The input {name!r:.100} holds an integer of more than 64 bits.")
    if dtype.kind in "iu" and values.dtype.kind == "f":
        raise InvalidInput(f"The input {name!r:.100} has the type {datatype}; its data must be integers.")
    check_range(name, datatype, values)
    if dtype.kind == "b":
        _check_bools(name, values)
    with np.errstate(over="ignore"):
        return values.reshape(shape).astype(np.float64 if dtype.kind in REAL else dtype, copy=False)


def check_range(name: str, datatype: str, values: Array) -> None:
    """Refuse integers that their type does not hold."""
    dtype = _dtype(name, datatype)
    if dtype.kind not in "iu" or not values.size:
        return
    limits, lowest, highest = np.iinfo(dtype), int(values.min()), int(values.max())
    if lowest < limits.min or highest > limits.max:
        raise InvalidInput(
            f"The input {name!r:.100} has values from {lowest} to {highest}; the type {datatype} holds "
            f"{limits.min} to {limits.max}."
        )


def _check_bools(name: str, values: Array) -> None:
    if ((values != 0) & (values != 1)).any():
        raise InvalidInput(
            f"The input {name!r:.100} has the type BOOL; its data must be true, false, 1 or 0."
        )


def to_binary(values: Array) -> bytes:
    """Write an array; objects are written as `BYTES`."""
    if values.dtype.kind != "O":
        return np.ascontiguousarray(values).tobytes()
    encoded = [one if isinstance(one, bytes) else str(one).encode() for one in values.ravel()]
    return b"".join(LENGTH.pack(len(one)) + one for one in encoded)


def view_of(values: Array) -> bytes | memoryview:
    """Give what `to_binary` writes; numbers are not copied."""
    if values.dtype.kind == "O" or not values.size:
        return to_binary(values)
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def datatype_of(values: Array) -> str:
    """Name the type of an array."""
    if values.dtype.kind == "O":
        return BYTES
    kind = {"f": "FP", "i": "INT", "u": "UINT"}.get(values.dtype.kind)
    return f"{kind}{8 * values.dtype.itemsize}" if kind else "BOOL"


def _dtype(name: str, datatype: str) -> np.dtype[Any]:
    if datatype not in DTYPES:
        known = ", ".join((*DTYPES, BYTES))
        raise InvalidInput(f"The input {name!r:.100} has the type {datatype!r:.50}; known types: {known}.")
    return DTYPES[datatype]


def _elements(name: str, data: memoryview, count: int) -> Array:
    found: list[bytes] = []
    position = 0
    while position + LENGTH.size <= len(data) and len(found) < count:
        (length,) = LENGTH.unpack_from(data, position)
        position += LENGTH.size
        found.append(bytes(data[position : position + length]))
        if len(found[-1]) != length:
            break
        position += length
    if len(found) != count or position != len(data):
        raise MalformedBody(
            f"The input {name!r:.100} must have {count} elements, each after its length; {len(data)} bytes "
            "were sent."
        )
    elements = np.empty(count, object)
    elements[:] = found
    return elements


def _flat(name: str, shape: tuple[int, ...], data: Any) -> list[Any]:
    """Return the values of nested lists, whose lists have the length at each depth that the shape has.

    The innermost lists may hold the values of several dimensions.
    """
    flat = data if isinstance(data, list) else [data]
    outer: list[int] = []
    while list in (types := set(map(type, flat))):
        if len(types) > 1 or len(set(map(len, flat))) > 1:
            raise InvalidInput(f"The data of the input {name!r:.100} are ragged lists.")
        outer.append(len(flat) // math.prod(outer))
        flat = [one for part in flat for one in part]
    if len(outer) >= max(len(shape), 1) or tuple(outer) != shape[: len(outer)]:
        raise InvalidInput(
            f"The data of the input {name!r:.100} have the shape "
            f"{[*outer, len(flat) // math.prod(outer)]!r:.100}; its `shape` is {list(shape)}."
        )
    return flat
