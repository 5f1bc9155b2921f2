"""Bounds as they are typed, `0.75` or `fraud=0.02`, brought to the form that requests use."""

import math
from collections.abc import Sequence

from boxcal.app.cli.failures import UsageError


def read_bounds(side: str, typed: Sequence[str]) -> float | dict[str, float] | None:
    """Read the values of `--lower` or `--upper`: one number for all classes, or any number of LABEL=NUMBER.

    Raises
    ------
    UsageError
        Quoting what cannot be read, what is given twice, or a number beside labels.
    """
    named: dict[str, float] = {}
    overall: float | None = None
    for text in typed:
        label, equals, value = text.rpartition("=")
        number = _number(side, text, value)
        if not equals:
            if overall is not None:
                raise UsageError(f"--{side} is given twice for all classes: {overall:g} and {number:g}")
            overall = number
        elif label in named:
            raise UsageError(f"--{side} is given twice for {label!r}: {named[label]:g} and {number:g}")
        else:
            named[label] = number
    if overall is not None and named:
        raise UsageError(f"--{side} takes one number for all classes or LABEL=NUMBER, not both: {typed!r}")
    return named or overall


def _number(side: str, text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise UsageError(f"--{side} {text!r}: {value!r} is not a number") from None
    if not math.isfinite(number):
        raise UsageError(f"--{side} {text!r}: {value!r} is not a probability")
    return number
