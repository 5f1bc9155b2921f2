"""Arrays of a request: `.npy` bodies, whose header is checked against their size, and numbers in JSON."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from boxcal.app.errors import InvalidInput, InvalidLogits, MalformedBody

MAX_DIMENSIONS = 32


def read_npy(body: bytes) -> NDArray[Any]:
    """View an `.npy` body as the array it holds, without a copy.

    Raises
    ------
    MalformedBody
        It is not `.npy`, does not hold numbers, or its size is not what its header announces.
    """
    stream = io.BytesIO(body)
    try:
        version = npy.read_magic(stream)
        if version == (1, 0):
            shape, fortran_order, dtype = npy.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, fortran_order, dtype = npy.read_array_header_2_0(stream)
        else:
            raise ValueError(f"version {version} is not supported")
    except Exception as error:  # numpy evaluates the header as Python: nearly every kind of error occurs
        raise MalformedBody(f"The body is not an .npy array: {error!s:.200}.") from error
    if dtype.kind not in "fiu" or not dtype.itemsize:
        raise MalformedBody(f"The .npy array has the type {dtype}; it must hold numbers.")
    count = math.prod(shape)
    held = len(body) - stream.tell()
    if any(size < 0 for size in shape) or len(shape) > MAX_DIMENSIONS or count * dtype.itemsize != held:
        raise MalformedBody(
            f"The .npy header announces the shape {shape} of {dtype}, {count * dtype.itemsize} bytes; "
            f"{held} bytes follow."
        )
    flat = np.frombuffer(body, dtype, count, stream.tell())
    return flat.reshape(shape, order="F" if fortran_order else "C")


def write_npy(values: NDArray[Any]) -> bytes:
    """Write an array as `.npy`."""
    stream = io.BytesIO()
    npy.write_array(stream, np.ascontiguousarray(values), version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def read_rows(rows: Any, num_classes: int) -> NDArray[np.float64]:
    """Read the rows of a JSON document as logits (N, K); empties `rows`.

    Raises
    ------
    InvalidLogits
        Naming the row, the class or the value.
    """
    if not isinstance(rows, list):
        raise InvalidLogits(f"logits is {_kind(rows)}; it must be a list of rows of {num_classes} numbers.")
    if not rows:
        raise InvalidLogits("logits holds no row.")
    for position, row in enumerate(rows):
        if not isinstance(row, list):
            raise InvalidLogits(
                f"logits[{position}] is {_kind(row)}; each row must be a list of {num_classes} numbers."
            )
        if len(row) != num_classes:
            raise InvalidLogits(
                f"logits[{position}] has {len(row)} numbers, but the model has {num_classes} classes."
            )
    values = np.empty((len(rows), num_classes))
    # Twice as fast as any numpy function that takes a list.
    numbers = f"{num_classes}d"
    for position, row in enumerate(rows):
        try:
            struct.pack_into(numbers, values.data, position * values.strides[0], *row)
        except (struct.error, OverflowError):
            raise InvalidLogits(_not_a_number(f"logits[{position}]", row)) from None
        rows[position] = None  # frees the row here and not all rows at once
    return finite_logits(values)


def check_logits(values: NDArray[Any], num_classes: int) -> NDArray[np.float64]:
    """Check an array of logits, and convert it to float64.

    Raises
    ------
    InvalidLogits
        It is not (N, K) with N at least 1, or not finite.
    """
    if values.ndim != 2 or values.shape[1] != num_classes or not len(values):
        raise InvalidLogits(
            f"The logits have the shape {values.shape}; it must be (N, {num_classes}), "
            f"for the model has {num_classes} classes."
        )
    return finite_logits(values.astype(np.float64, order="C"))


def finite_logits(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return logits (N, K) if they are finite.

    Raises
    ------
    InvalidLogits
        Naming the first that is not.
    """
    flat = values.ravel(order="K")
    if math.isfinite(flat.dot(flat)):  # one quick pass; only very large numbers need the other
        return values
    finite = np.isfinite(values)
    if not finite.all():
        row, column = np.unravel_index(int(finite.argmin()), values.shape)
        raise InvalidLogits(f"logits[{row}][{column}] is {values[row, column]}; logits must be finite.")
    return values


def check_samples(values: NDArray[Any], shape: Sequence[int]) -> NDArray[np.float32]:
    """Check an array of inputs (N, *shape), and convert it to float32.

    Raises
    ------
    InvalidInput
        It has another shape, is empty or not finite.
    """
    if values.shape[1:] != tuple(shape) or values.ndim == 0 or not len(values):
        expected = ", ".join(("N", *map(str, shape)))
        raise InvalidInput(f"The array has the shape {values.shape}; the model takes ({expected}).")
    with np.errstate(over="ignore"):
        samples = values.astype(np.float32)
    return _finite(samples, "array")


def read_tensor(value: Any, shape: Sequence[int]) -> NDArray[np.float32]:
    """Read one input from nested JSON lists.

    Raises
    ------
    InvalidInput
        It is ragged, of another shape, or not made of finite numbers.
    """
    if (actual := _shape(value)) != tuple(shape):
        raise InvalidInput(f"The tensor has the shape {actual}; the model takes {tuple(shape)}.")
    samples = np.empty(actual, np.float32)
    _fill(samples, value)
    return _finite(samples, "tensor")


def _shape(value: Any) -> tuple[int, ...]:
    """Return the shape of nested lists, by the first item of each."""
    shape: tuple[int, ...] = ()
    while isinstance(value, list) and len(shape) <= MAX_DIMENSIONS:
        shape = (*shape, len(value))
        value = value[0] if value else None
    return shape


def _fill(target: NDArray[np.float32], value: Any) -> None:
    """Fill an array from nested lists, one innermost list at a time; other threads can run between."""
    if not isinstance(value, list) or len(value) != len(target):
        raise InvalidInput("The tensor is ragged: its lists differ in length.")
    if target.ndim > 1:
        for part, item in zip(target, value, strict=True):
            _fill(part, item)
        return
    try:
        if not all(type(number) in (float, int) for number in value):
            raise InvalidInput("The tensor holds something that is not a number.")
        with np.errstate(over="ignore"):
            target[...] = np.array(value, np.float64)
    except OverflowError:
        raise InvalidInput("The tensor holds an integer that is too large.") from None


def _finite(samples: NDArray[np.float32], name: str) -> NDArray[np.float32]:
    if not np.isfinite(samples).all():
        raise InvalidInput(f"The {name} holds NaN, or numbers that are infinite in float32.")
    return samples


def _not_a_number(name: str, row: Sequence[Any]) -> str:
    for position, value in enumerate(row):
        if not isinstance(value, int | float):
            return f"{name}[{position}] is {value!r:.100}; logits are numbers."
    return f"{name} holds an integer too large for a logit."


def _kind(value: Any) -> str:
    return {dict: "an object", str: "a string", type(None): "null", bool: "a boolean"}.get(
        type(value), f"{value!r:.50}"
    )
