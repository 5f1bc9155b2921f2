"""Arrays of uploads and of requests: `.npy`, without pickle or an unchecked size, and numbers in JSON."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Mapping, Sequence
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from boxcal.app.http.problems import InvalidLogits, MalformedBody
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.scores import PRECISION, refusal_of_batch, two_columns
from boxcal.calibrators.scores import as_logits as converted

Array = NDArray[Any]
Batch = Mapping[str, Array]
"""Rows of a validation set: arrays by name."""

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


WRITE_BYTES = 2**18
DOT_NUMBERS = 8192
"""BLAS takes the product of longer vectors with threads that wait for each other: 10 ms on busy cores."""


def read_npy(body: bytes) -> NDArray[Any]:
    """View an `.npy` body as the array it holds, without a copy."""
    start = io.BytesIO(memoryview(body)[: 2 * MAX_HEADER_BYTES])
    try:
        header = read_header(start, len(body))
    except ValueError as error:
        raise MalformedBody(f"The body {error}.") from error
    if header.dtype.kind not in "fiu" or not header.dtype.itemsize:
        raise MalformedBody(f"The .npy array has the type {header.dtype}; it must hold numbers.")
    return header.array(memoryview(body)[header.offset :])


def write_npy(values: NDArray[Any]) -> list[bytes]:
    """Write an array as `.npy`, in pieces, so that other threads can run between."""
    stream = io.BytesIO()
    whole = np.ascontiguousarray(values)
    npy.write_array_header_1_0(stream, npy.header_data_from_array_1_0(whole))
    data = whole.reshape(-1).view(np.uint8)
    pieces = [data[start : start + WRITE_BYTES].tobytes() for start in range(0, len(data), WRITE_BYTES)]
    return [stream.getvalue(), *pieces]


def read_rows(
    rows: Any, num_classes: int, name: str = "logits", *, check_finite: bool = True, of_model: bool = True
) -> NDArray[np.float64]:
    """Read the rows of a JSON document as logits or probabilities (N, K); empties `rows`.

    `of_model`: whether `num_classes` is that of a model, in place of the numbers of the first row.
    """
    if not isinstance(rows, list):
        raise InvalidLogits(f"{name} is {_kind(rows)}; it must be a list of rows of {num_classes} numbers.")
    if not rows:
        raise InvalidLogits(f"{name} holds no row.")
    if num_classes == 2 and _is_single(rows[0]):
        column = [row if isinstance(row, list) else [row] for row in rows]
        return two_columns(read_rows(column, 1, name, check_finite=check_finite), name)
    for position, row in enumerate(rows):
        if not isinstance(row, list):
            raise InvalidLogits(
                f"{name}[{position}] is {_kind(row)}; each row must be a list of {num_classes} numbers."
            )
        if len(row) != num_classes:
            wanted = f"the model has {num_classes} classes"
            wanted = wanted if of_model and name != "features" else f"{name}[0] has {num_classes}"
            raise InvalidLogits(f"{name}[{position}] has {len(row)} numbers, but {wanted}.")
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

    `check_finite`: whether to look at the numbers; `TemperatureRows.summarised` does so itself.
    """
    if num_classes == 2 and values.size and values.shape in {(len(values),), (len(values), 1)}:
        values = two_columns(values, name)
    if values.ndim != 2 or values.shape[1] != num_classes or not len(values):
        raise InvalidLogits(
            f"The {name} have the shape {values.shape}; it must be (N, {num_classes}), "
            f"for the model has {num_classes} classes."
        )
    is_as_needed = values.dtype == np.float64 and values.flags.carray
    wide = values if is_as_needed else values.astype(np.float64, order="C")
    return finite(wide, name) if check_finite else wide


def _is_single(row: Any) -> bool:
    return len(row) == 1 if isinstance(row, list) else isinstance(row, int | float)


def finite(values: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """Return values (N, K) if they are finite."""
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

    `scores`: (N, K), finite.
    """
    precision = float(np.finfo(sent).eps) if sent.kind == "f" else PRECISION
    try:
        return converted(scores, kind, precision=max(PRECISION, precision))[0]
    except InvalidDataError as error:
        raise InvalidLogits(str(error)) from error


def check_are_logits(rows: NDArray[np.float64]) -> None:
    """Refuse rows (N, K) that were sent as logits and look like probabilities or percentages."""
    if refusal := refusal_of_batch(rows):
        raise InvalidLogits(
            f"{refusal} It is part of the query string; a JSON body names its rows `probabilities` or"
            " `percent`."
        )


def _not_a_number(name: str, row: Sequence[Any]) -> str:
    for position, value in enumerate(row):
        if not isinstance(value, int | float):
            return f"{name}[{position}] is {value!r:.100}; it must be a number."
    return f"{name} holds an integer that is too large."


def _kind(value: Any) -> str:
    return {dict: "an object", str: "a string", type(None): "null", bool: "a boolean"}.get(
        type(value), f"{value!r:.50}"
    )
