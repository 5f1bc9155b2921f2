"""Rows of features: what a tabular model reads, as a list of values or as an object of values by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.models import UnusableInput
from boxcal.models.inputs.base import Kind, Samples

EXACT = 2**53
"""Integers below this are exact in float64."""
INTEGERS = ("int64", "int32")


@dataclass(frozen=True)
class Column:
    """One input of a model, for `width` features."""

    name: str
    dtype: str  # numpy's name of its type, such as `float32`, `int64` or `str`
    width: int

    @property
    def is_text(self) -> bool:
        """Whether the features are strings."""
        return self.dtype == "str"

    @property
    def holds_integers(self) -> bool:
        """Whether the features are integers."""
        return self.dtype in INTEGERS

    @cached_property
    def largest(self) -> float:
        """Largest magnitude of a feature that the input can hold, and float64 exactly if it is an integer."""
        if self.holds_integers:
            return min(EXACT - 1, int(np.iinfo(self.dtype).max))
        return float(np.finfo(self.dtype if self.dtype.startswith("float") else "float64").max)


def positions(count: int) -> list[str]:
    """Name features that have no names: 0, 1, 2 and so on."""
    return [f"{index}" for index in range(count)]


class RowInputs:
    """Rows of D features, float64, or objects where some are strings.

    `by_feature` has the input of each feature. `is_free` says which features may have any value, because the
    model takes no categories there.
    """

    kind: Kind = "rows"
    members = ("features", "tensor", "cells")

    def __init__(
        self,
        columns: Sequence[Column],
        names: Sequence[str],
        *,
        has_missing: bool,
        categories: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.columns = tuple(columns)
        self.names = tuple(names)
        self.shape = (len(self.names),)
        self.has_missing = has_missing
        self._position = {name: index for index, name in enumerate(self.names)}
        self.by_feature = [column for column in columns for _ in range(column.width)]
        self._example = [
            ("" if column.is_text else 0.0) if (known := categories.get(column.name)) is None else known
            for column in self.by_feature
        ]
        self.is_free = np.array([column.name not in categories for column in self.by_feature])
        self._is_numeric = not any(column.is_text for column in columns)
        # One input whose features nothing names: they are known by their order alone
        self.has_names = len(columns) > 1 or self.names != tuple(positions(len(self.names)))

    def refusal(self, member: str) -> str:
        """Say why this input cannot be read."""
        return f"The model takes `features`, a row of {len(self.names)} values, not {member}."

    def example(self) -> dict[str, Any]:
        """Give zeros, empty strings and one of the known categories, by name."""
        plain = (one.item() if isinstance(one, np.generic) else one for one in self._example)
        return {"features": dict(zip(self.names, plain, strict=True))}

    def blank(self, count: int) -> Samples:
        """Give rows of zeros, empty strings, and one of the known categories."""
        rows = np.empty((count, *self.shape), np.float64 if self._is_numeric else object)
        rows[:] = self._example
        return rows

    def decode(self, member: str, value: Any, max_pixels: int) -> Samples:
        """Turn values, or an object of values by name, into one row.

        `cells` are names, texts and the decimal mark of numbers among these.
        """
        decimal = "."
        if member == "cells":
            names, texts, decimal = value
            in_order = not self.has_names and self._position.keys().isdisjoint(names)
            value = [*texts] if in_order else dict(zip(names, texts, strict=True))
            if len(value) < len(names):
                repeated = next(name for index, name in enumerate(names) if name in names[:index])
                raise UnusableInput(f"The table has more than one column {repeated!r:.100}.")
        if isinstance(value, dict):
            if unknown := next((name for name in value if name not in self._position), None):
                said = "" if self.has_names else " Its features have no names; send a list of their values."
                raise UnusableInput(f"The model has no feature {unknown!r:.100}.{said}")
            if absent := next((name for name in self.names if name not in value), None):
                raise UnusableInput(f"The feature {absent!r:.100} is missing; write null if it is not known.")
            value = [value[name] for name in self.names]
        if not isinstance(value, list) or len(value) != len(self.names):
            what = f"{len(value)} values" if isinstance(value, list) else "no list"
            raise UnusableInput(f"The row has {what}; the model takes {len(self.names)} features.")
        if member == "cells":
            value = [
                _cell(column, text, decimal) for column, text in zip(self.by_feature, value, strict=True)
            ]
        row = np.empty(self.shape, np.float64 if self._is_numeric else object)
        for index, (column, one) in enumerate(zip(self.by_feature, value, strict=True)):
            row[index] = self._value(column, one, self.names[index])
        return row

    def check(self, values: NDArray[Any]) -> Samples:
        """Check rows of numbers (N, D)."""
        if not self._is_numeric:
            raise UnusableInput("The model has features that are strings; send rows as JSON or CSV.")
        if values.ndim != 2 or values.shape[1:] != self.shape or not len(values):
            raise UnusableInput(
                f"The array has the shape {values.shape}; the model takes (N, {len(self.names)})."
            )
        return self.of_columns([*values.astype(np.float64).T])

    def of_columns(self, columns: Sequence[NDArray[Any]], first: int = 0, name: str = "inputs") -> Samples:
        """Turn the values of each feature, D arrays (N,) of floats or strings, into rows.

        `name`: what rows are called in messages.
        """
        rows = np.empty((len(columns[0]), *self.shape), np.float64 if self._is_numeric else object)
        for index, (column, values) in enumerate(zip(self.by_feature, columns, strict=True)):
            wrong = np.flatnonzero(self._is_wrong(column, values))
            if wrong.size:
                row = int(wrong[0])
                try:
                    self._value(column, values[row : row + 1].tolist()[0], self.names[index])
                except UnusableInput as error:
                    raise UnusableInput(f"{name}[{first + row}]: {error}") from None
            rows[:, index] = values
        return rows

    def _is_wrong(self, column: Column, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Say which values of a feature `_value` refuses."""
        if column.is_text:
            return np.array([not isinstance(value, str) for value in values], bool)
        missing = np.isnan(values)
        wrong: NDArray[np.bool_] = missing & (not self.has_missing or column.holds_integers)
        wrong |= np.abs(values) > column.largest
        if column.holds_integers:
            wrong |= ~missing & (values != np.round(values))
        return wrong

    def batch(self, samples: Samples) -> dict[str, NDArray[Any]]:
        """Give the array of each input of the model, (N, width)."""
        given, start = {}, 0
        for column in self.columns:
            part = samples[:, start : start + column.width]
            given[column.name] = np.ascontiguousarray(part if column.is_text else part.astype(column.dtype))
            start += column.width
        return given

    def _value(self, column: Column, value: Any, name: str) -> Any:
        if column.is_text:
            if isinstance(value, str):
                return value
            raise UnusableInput(f"The feature {name!r} is {value!r:.100}; it is a string.")
        if value is None:
            value = float("nan")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UnusableInput(f"The feature {name!r} is {value!r:.100}; it is a number.")
        if abs(value) == math.inf:
            raise UnusableInput(self._refused(value, name))
        if abs(value) > column.largest:
            raise UnusableInput(_too_large(value, name, column))
        if math.isnan(value) and (not self.has_missing or column.holds_integers):
            raise UnusableInput(self._refused(value, name))
        if column.holds_integers and value != int(value):
            raise UnusableInput(f"The feature {name!r} is {value!r:.100}; it is an integer.")
        return float(value)

    def _refused(self, value: Any, name: str) -> str:
        missing = "missing" if math.isnan(value) else str(value)
        return f"The feature {name!r} is {missing}; the model reads finite numbers."


def _too_large(value: float, name: str, column: Column) -> str:
    return (
        f"The feature {name!r} is {value!s:.100}; the model reads {column.dtype}, at most "
        f"{column.largest:.17g} in magnitude."
    )


def _cell(column: Column, text: str, decimal: str) -> Any:
    """Read the text of a feature; an empty one is a missing value."""
    if column.is_text:
        return text
    try:
        return number_of(text.replace(decimal, ".")) if text.strip() else None
    except ValueError:
        return text  # refused with the name of the feature


def number_of(text: str) -> float:
    """Read a number as other languages write it too: `1_000` is one in Python alone."""
    if "_" in text:
        raise ValueError(text)
    return float(text)
