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

from boxcal.app.http.problems import InvalidLogits, MalformedBody

MAX_DIMENSIONS = 32
MAX_HEADER_BYTES = 2**17
WRITE_BYTES = 2**18
DOT_NUMBERS = 8192
"""BLAS takes the product of longer vectors with threads that wait for each other: 10 ms on busy cores."""
PROBABILITY_SUM_TOLERANCE = 1e-2
"""Largest distance of a row's sum from 1; the row is divided by its sum."""


def read_npy(body: bytes | bytearray) -> NDArray[Any]:
    """View an `.npy` body as the array it holds, without a copy.

    Raises
    ------
    MalformedBody
        It is not `.npy`, does not hold numbers, or its size is not what its header announces.
    """
    stream = io.BytesIO(memoryview(body)[:MAX_HEADER_BYTES])
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


def write_npy(values: NDArray[Any]) -> list[bytes]:
    """Write an array as `.npy`, in pieces, so that other threads can run between."""
    stream = io.BytesIO()
    whole = np.ascontiguousarray(values)
    npy.write_array_header_1_0(stream, npy.header_data_from_array_1_0(whole))
    data = whole.reshape(-1).view(np.uint8)
    pieces = [data[start : start + WRITE_BYTES].tobytes() for start in range(0, len(data), WRITE_BYTES)]
    return [stream.getvalue(), *pieces]


def read_rows(
    rows: Any, num_classes: int, name: str = "logits", *, check_finite: bool = True
) -> NDArray[np.float64]:
    """Read the rows of a JSON document as logits or probabilities (N, K); empties `rows`.

    Parameters
    ----------
    check_finite
        As `check_scores` takes it.

    Raises
    ------
    InvalidLogits
        Naming the row, the class or the value.
    """
    if not isinstance(rows, list):
        raise InvalidLogits(f"{name} is {_kind(rows)}; it must be a list of rows of {num_classes} numbers.")
    if not rows:
        raise InvalidLogits(f"{name} holds no row.")
    for position, row in enumerate(rows):
        if not isinstance(row, list):
            raise InvalidLogits(
                f"{name}[{position}] is {_kind(row)}; each row must be a list of {num_classes} numbers."
            )
        if len(row) != num_classes:
            raise InvalidLogits(
                f"{name}[{position}] has {len(row)} numbers, but the model has {num_classes} classes."
            )
    values = np.empty((len(rows), num_classes))
    # Twice as fast as any numpy function that takes a list.
    numbers = f"{num_classes}d"
    for position, row in enumerate(rows):
        try:
            struct.pack_into(numbers, values.data, position * values.strides[0], *row)
        except (struct.error, OverflowError):
            raise InvalidLogits(_not_a_number(f"{name}[{position}]", row)) from None
        rows[position] = None  # frees the row here and not all rows at once
    return finite(values, name) if check_finite else values


def check_scores(
    values: NDArray[Any], num_classes: int, name: str = "logits", *, check_finite: bool = True
) -> NDArray[np.float64]:
    """Check an array of logits or probabilities, and convert it to float64 if the compiled loops need that.

    Parameters
    ----------
    check_finite
        Whether to look at the numbers; `PlainRows.summarised` refuses what is not finite itself.

    Raises
    ------
    InvalidLogits
        It is not (N, K) with N at least 1, or not finite.
    """
    if values.ndim != 2 or values.shape[1] != num_classes or not len(values):
        raise InvalidLogits(
            f"The {name} have the shape {values.shape}; it must be (N, {num_classes}), "
            f"for the model has {num_classes} classes."
        )
    is_as_needed = values.dtype == np.float64 and values.flags.carray
    wide = values if is_as_needed else values.astype(np.float64, order="C")
    return finite(wide, name) if check_finite else wide


def finite(values: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """Return values (N, K) if they are finite.

    Raises
    ------
    InvalidLogits
        Naming the first that is not.
    """
    # One quick pass; only very large numbers need the other.
    flat = values.ravel(order="K")
    if len(flat) <= DOT_NUMBERS:
        is_small = math.isfinite(flat.dot(flat))
    else:
        parts = (flat[start : start + DOT_NUMBERS] for start in range(0, len(flat), DOT_NUMBERS))
        is_small = all(math.isfinite(part.dot(part)) for part in parts)
    if is_small:
        return values
    is_finite = np.isfinite(values)
    if not is_finite.all():
        row, column = np.unravel_index(int(is_finite.argmin()), values.shape)
        raise InvalidLogits(f"{name}[{row}][{column}] is {values[row, column]}; {name} must be finite.")
    return values


def as_logits(scores: NDArray[np.float64], kind: str, sent: np.dtype[Any]) -> NDArray[np.float64]:
    """Return logits as they are, and the logarithms of probabilities.

    Parameters
    ----------
    scores
        (N, K), finite.
    kind
        `logits` or `probabilities`; rows of probabilities are divided by their sums first.
    sent
        The type in which they were sent: a probability below its smallest number counts as that, because 0
        has no logarithm.

    Raises
    ------
    InvalidLogits
        Naming the row and class outside [0, 1], or the row whose sum is further than 1e-2 from 1.
    """
    if kind == "logits":
        return scores
    probabilities = scores
    smallest = float(np.finfo(sent if sent.kind == "f" else np.dtype(np.float64)).tiny)
    outside = (probabilities < 0) | (probabilities > 1)
    if outside.any():
        row, column = np.unravel_index(int(outside.argmax()), outside.shape)
        raise InvalidLogits(
            f"probabilities[{row}][{column}] is {probabilities[row, column]}; a probability lies between 0 "
            "and 1. Send scores of another kind as `logits`."
        )
    sums = probabilities.sum(axis=1, keepdims=True)
    off = np.abs(sums[:, 0] - 1)
    if off.max() > PROBABILITY_SUM_TOLERANCE:
        first = int(off.argmax())
        raise InvalidLogits(
            f"probabilities[{first}] sums to {sums[first, 0]:.6g}; a sum may differ from 1 by at most "
            f"{PROBABILITY_SUM_TOLERANCE:g}."
        )
    logarithms: NDArray[np.float64] = np.log(np.maximum(probabilities / sums, smallest))
    return logarithms


def _not_a_number(name: str, row: Sequence[Any]) -> str:
    for position, value in enumerate(row):
        if not isinstance(value, int | float):
            return f"{name}[{position}] is {value!r:.100}; it must be a number."
    return f"{name} holds an integer that is too large."


def _kind(value: Any) -> str:
    return {dict: "an object", str: "a string", type(None): "null", bool: "a boolean"}.get(
        type(value), f"{value!r:.50}"
    )
