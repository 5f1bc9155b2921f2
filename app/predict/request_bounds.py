"""The bounds of a request: checked against the labels and made two vectors before any work is done."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.app.errors import InvalidBounds
from boxcal.app.predict.options import BoundsOption


@dataclass(frozen=True, slots=True, eq=False)
class RequestBounds:
    """Feasible hard bounds of one request.

    Attributes
    ----------
    lower, upper
        (K,) float64; 0 <= lower <= upper <= 1 and, up to rounding, sum(lower) <= 1 <= sum(upper).
    """

    lower: NDArray[np.float64]
    upper: NDArray[np.float64]


class Labels:
    """The K class names of the backbone, in the order of its logits, and where each one stands."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.index = {name: position for position, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.names)


def check(bounds: BoundsOption | None, labels: Labels) -> RequestBounds | None:
    """Make bounds of what was sent; None where nothing is bounded.

    Raises
    ------
    InvalidBounds
        Naming the class, the sum or the value.
    """
    if bounds is None or (_says(bounds.lower, 0) and _says(bounds.upper, 1)):
        return None
    lower = _vector("lower", bounds.lower, labels, default=0.0)
    upper = _vector("upper", bounds.upper, labels, default=1.0)
    crossed = lower > upper
    if crossed.any():
        worst = int(crossed.argmax())
        raise InvalidBounds(
            f"The lower bound {lower[worst]!s} of class {labels.names[worst]!r} is above its upper bound "
            f"{upper[worst]!s}."
        )
    tolerance = sum_tolerance(len(labels))
    if (total := math.fsum(lower)) > 1.0 + tolerance:
        raise InvalidBounds(f"The lower bounds of the {len(labels)} classes add up to {total!r}, above 1.")
    if (total := math.fsum(upper)) < 1.0 - tolerance:
        raise InvalidBounds(f"The upper bounds of the {len(labels)} classes add up to {total!r}, below 1.")
    return RequestBounds(lower, upper)


def sum_tolerance(num_classes: int) -> float:
    """How far a sum of K bounds may miss 1 by rounding alone, as in seven times 1/7."""
    return float(np.finfo(np.float64).eps) * (8.0 + math.sqrt(num_classes))


def _says(value: Any, number: float) -> bool:
    return isinstance(value, int | float) and value == number


def _vector(side: str, value: Any, labels: Labels, *, default: float) -> NDArray[np.float64]:
    """Bring one side to a (K,) vector."""
    if isinstance(value, Mapping):
        vector = np.full(len(labels), default)
        for name, number in value.items():
            position = labels.index.get(name)
            if position is None:
                raise InvalidBounds(f"bounds.{side} names {_unknown(name, labels)}.")
            vector[position] = _number(side, number, f" of class {name!r}")
        return vector
    if isinstance(value, list | tuple):
        if len(value) != len(labels):
            raise InvalidBounds(
                f"bounds.{side} has {len(value)} numbers, but the model has {len(labels)} classes."
            )
        return np.array(
            [
                _number(side, number, f" of class {labels.names[position]!r}")
                for position, number in enumerate(value)
            ]
        )
    return np.full(len(labels), _number(side, value, ""))


def _number(side: str, value: Any, where: str) -> float:
    if type(value) is float and 0.0 <= value <= 1.0:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidBounds(f"bounds.{side}{where} is {value!r:.100}; a bound is a number.")
    if not 0 <= value <= 1:
        raise InvalidBounds(f"bounds.{side}{where} is {value!r:.100}; a bound is a probability in [0, 1].")
    return float(value)


def _unknown(name: Any, labels: Labels) -> str:
    close = difflib.get_close_matches(str(name)[:100], labels.names[:2000], n=1)
    return f"{name!r:.100}, a class the model does not have" + (
        f"; did you mean {close[0]!r}?" if close else ""
    )
