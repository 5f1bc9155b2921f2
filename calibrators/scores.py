"""What scores of a classifier are: logits, probabilities or percentages; how they look, and become logits.

`as_logits` is their one conversion, so that a row has the same logits in every format and number type. Their
columns are named by the classes: `names_are_integers` says when an integer among the labels is such a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.errors import InvalidDataError

Array = NDArray[Any]
Kind = Literal["logits", "probabilities", "percent"]
LOGITS, PROBABILITIES, PERCENT = KINDS = ("logits", "probabilities", "percent")
SIGMOIDS = "sigmoids"
WHOLE = {PROBABILITIES: 1.0, PERCENT: 100.0}
"""What a row of each kind sums to."""
SMALLEST = float(np.finfo(np.float32).tiny)
"""A probability below it counts as it, because 0 has no logarithm: e^-87.3, in every format and type."""
BEYOND = 1e-5
"""How far beyond 0 and 1 sums and means leave a probability; the number type may explain more."""
SUM_TOLERANCE = 0.01
"""Largest distance of a row's sum from 1, inclusive; more only as far as visible rounding explains it."""
MOST_ROUNDING = 0.5
"""Largest distance that rounding may explain."""
ROUNDING = 1e-3
"""A sum further than this from 1 is remarked; float16 rows of a thousand classes are no better."""
DECIMALS = (0, 1, 2, 3, 4)
ENOUGH_FOR_SIGMOIDS = 20
LARGEST_LOGIT = 40.0
"""Of numbers that are all at least 0: a model that is so sure of one class is sure of the other too."""
ENOUGH_OF_A_BATCH = 8
"""Rows to calibrate whose first ones tell their kind: logits of so many do not sum to 1 by chance."""
PRECISION = float(np.finfo(np.float32).eps)
EXACT = 2**53
"""Integers below it are exact in float64."""


@dataclass
class ScoreLook:
    """What all rows (N, K) of a set have in common, from which the kind of the scores is recognised.

    Attributes
    ----------
    rows, width
        N and K.
    least, largest
        Of all values.
    sums
        Smallest and largest sum of a row.
    decimals
        Numbers of decimals, of `DECIMALS`, to which every value is rounded.
    """

    rows: int = 0
    width: int = 0
    least: float = np.inf
    largest: float = -np.inf
    sums: tuple[float, float] = np.inf, -np.inf
    decimals: set[int] = field(default_factory=lambda: set(DECIMALS))

    @classmethod
    def of(cls, blocks: Iterable[Array]) -> ScoreLook:
        """Look at finite rows (n, K), block by block."""
        look = cls()
        for block in blocks:
            look.add(block)
        return look

    def add(self, block: Array) -> None:
        """Look at further finite rows (n, K)."""
        if not block.size or self.least < -BEYOND:  # logits, whatever follows
            return
        self.rows, self.width = self.rows + len(block), block.shape[1]
        self.least = min(self.least, float(block.min()))
        self.largest = max(self.largest, float(block.max()))
        if self.least < -BEYOND:
            return
        sums = block.sum(axis=1, dtype=np.float64)
        self.sums = min(self.sums[0], float(sums.min())), max(self.sums[1], float(sums.max()))
        self.decimals = {one for one in self.decimals if _is_rounded(block, one)}

    @property
    def kind(self) -> str | None:
        """`probabilities`, `percent` or `sigmoids`, if the rows look like them in place of logits."""
        if not self.rows or self.least < -BEYOND or self.largest == self.least:
            return None
        for kind, whole in WHOLE.items():
            # Values that are all whole numbers are no probabilities, but may be percentages.
            steps = [10.0**-one / whole for one in self.decimals if kind == PERCENT or one >= 2]
            off = max(abs(one / whole - 1) for one in self.sums)
            if self.largest <= whole * (1 + SUM_TOLERANCE) and off <= tolerance(self.width, steps):
                return kind
        return SIGMOIDS if self.largest <= 1 and self.rows >= ENOUGH_FOR_SIGMOIDS else None

    def _kind_of_one(self) -> str | None:
        """Tell probabilities and percentages of the second class from logits, of which few are so large."""
        if not self.rows or self.least < -BEYOND or self.largest == self.least:
            return None
        if self.largest <= 1 + BEYOND:
            return PROBABILITIES
        return PERCENT if LARGEST_LOGIT < self.largest <= 100 else None

    def refusal(self, *, of_one: bool = False) -> str | None:
        """Say why scores that were sent as logits are not read as such; None where they may be.

        `of_one`: whether the only column has the scores of the second of two classes.
        """
        kind = self._kind_of_one() if of_one else self.kind
        if kind not in WHOLE:
            return None
        called = "percentages" if kind == PERCENT else kind
        if of_one:
            return (
                f"There is one column of scores for two classes, all between 0 and {WHOLE[kind]:g}. Set "
                f"scores={kind} if they are {called} of the second class, or scores=logits."
            )
        return (
            f"The scores look like {called}: every value is at least 0 and every row sums to "
            f"{WHOLE[kind]:g}. Set scores={kind}; if these are logits all the same, set scores=logits."
        )


def refusal_of_batch(logits: Array) -> str | None:
    """Say why rows (n, K) to calibrate are not taken for logits; None where they may be, or are few."""
    rows = logits[:ENOUGH_OF_A_BATCH]
    if len(rows) < ENOUGH_OF_A_BATCH or rows[0].min() < 0:
        return None
    if ((rows == 0) | (rows == 1)).all():  # unit vectors, with which people try a calibrator
        return None
    return ScoreLook.of([rows]).refusal()


def as_logits(values: Array, kind: str, first: int = 0, *, precision: float = PRECISION) -> tuple[Array, int]:
    """Return logits as they are, and the logarithms of probabilities or percentages.

    A row of probabilities p is divided by its sum first; p below `SMALLEST` counts as it, also one that
    rounding made negative.

    Parameters
    ----------
    values : (n, K)
        Finite.
    kind : str
        One of `KINDS`.
    first : int
        Number of the first row, for messages.
    precision : float
        Relative error of the numbers as they were sent.

    Returns
    -------
    float64 (n, K) unless logits were given, and the number of rows whose sum was remarkably far from 1.

    Raises
    ------
    InvalidDataError
        Naming the row and the value that is no probability, or the sum that is not 1.
    """
    if kind not in WHOLE:
        return values, 0
    whole = WHOLE[kind]
    shares = values.astype(np.float64) / whole
    beyond = max(BEYOND, precision)
    outside = np.argwhere((shares < -beyond) | (shares > 1 + (SUM_TOLERANCE if kind == PERCENT else beyond)))
    if outside.size:
        row, column = (int(index) for index in outside[0])
        looks = ScoreLook.of([values]).kind
        advice = f"Set scores={PERCENT}." if looks == PERCENT else "Send scores of another kind as `logits`."
        what = (
            "a percentage lies between 0 and 100" if kind == PERCENT else "a probability lies between 0 and 1"
        )
        raise InvalidDataError(f"{kind}[{first + row}, {column}] is {values[row, column]}; {what}. {advice}")
    shares = np.maximum(shares, 0.0)
    sums = shares.sum(axis=1, keepdims=True)
    distance = np.abs(sums[:, 0] - 1)
    if distance.max(initial=0.0) > SUM_TOLERANCE + PRECISION:
        steps = [10.0**-one / whole for one in DECIMALS if _is_rounded(values, one, precision)]
        allowed = tolerance(values.shape[1], [step for step in steps if step <= SUM_TOLERANCE])
        if distance.max() > allowed:
            row = int((distance > allowed).argmax())
            raise InvalidDataError(
                f"{kind}[{first + row}] sums to {sums[row, 0] * whole:.6g}; the {kind} of a sample sum to "
                f"{whole:g}."
            )
    logits: Array = np.log(np.maximum(shares / sums, SMALLEST))
    return logits, int((distance > ROUNDING).sum())


def tolerance(width: int, steps: Iterable[float]) -> float:
    """Largest distance of a row's sum from 1: .01, or what K values rounded to one of the steps explain."""
    explained = min(width * max(steps, default=0.0) / 2, MOST_ROUNDING)
    return max(SUM_TOLERANCE, explained) + PRECISION


def two_columns(values: Array, kind: str) -> Array:
    """Give both columns of a model of two classes that sends one: that of the second class.

    Parameters
    ----------
    values : (n,) or (n, 1)
        Probabilities of the second class, or its log-odds or decision values.
    """
    second = values.reshape(-1)
    first = np.zeros_like(second) if kind == LOGITS else WHOLE[kind] - second
    return np.stack([first, second], axis=1)


def _is_rounded(values: Array, decimals: int, precision: float = PRECISION) -> bool:
    """Whether every value has so few decimals, as far as its number type can tell."""
    scaled = values.astype(np.float64) * 10.0**decimals
    error = precision * 10.0**decimals * max(1.0, float(np.abs(values).max(initial=0.0)))
    return error < 0.1 and bool((np.abs(scaled - np.rint(scaled)) <= error).all())


def integer_of(name: str) -> int | None:
    """Return the integer that a name of a class, or a label, writes; None for any other."""
    try:
        number = float(name)
    except ValueError:
        return None
    if "_" in name:  # a number in Python alone: `1_0` and `10` are two names
        return None
    return int(number) if number.is_integer() and abs(number) < EXACT else None


def names_are_integers(classes: Sequence[str]) -> bool:
    """Whether classes are named by integers that are not their own indices: an integer is then a name."""
    numbers = [integer_of(name) for name in classes]
    return None not in numbers and numbers != list(range(len(numbers)))
