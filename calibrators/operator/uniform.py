"""The CPU engine's form for fits of uniform bounds: many bounds evaluated on the same rows.

Each row is sorted once. Any pair (lower, upper) then costs O(log K) per row, with the closed-form gradient of
the label's log-probability, where the general operator costs O(K).
"""

import math
from copy import copy
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
from numba import njit
from numpy.typing import NDArray

from boxcal.calibrators.operator.compiling import compiled
from boxcal.calibrators.operator.constants import UNDERFLOW, sum_tolerance
from boxcal.calibrators.operator.cpu_loops import total_of
from boxcal.calibrators.threads import blocks, over_rows

Floats = NDArray[np.float64]
Cuts = NDArray[np.int32]

MANY = 500_000
"""Entries above which the rows are shared among threads."""
MAX_PASSES, VERTEX = 400, 1e-15
"""Far more Newton steps than any row needs; and a mass below which the bounds alone add up to 1."""


def open_cuts(scores: NDArray[Any]) -> Cuts:
    """Give the cuts (N, 2) of rows of which no bound holds an entry."""
    return np.tile(np.array([0, scores.shape[1]], np.int32), (len(scores), 1))


class UniformNll(NamedTuple):
    """Mean negative log-likelihood of the labels in nats, and its derivatives in the two bounds."""

    value: float
    by_lower: float
    by_upper: float


class SortedRows:
    """Logits sorted along the classes, for evaluation under any uniform bounds.

    With w = exp(g) in ascending order and T_j the sum of w up to j, BCSoftmax(g; a, b) under the same a and b
    for every class gives b to the last classes, a to the first, and in between w times the remaining mass,
    divided by T_j - T_i. The search for the two cuts starts at those of the last bounds. It keeps a float64
    array of the logits' shape (0.4 GB for N = 50,000 and K = 1000), and a second one for the sums once bounds
    are evaluated. Use it from one thread at a time.

    `logits`: tensor or ndarray of shape (N, K), without NaN and +inf, at least one finite logit in each row.
    A logit of -inf counts as one 800 below the row's lowest finite one, so that a label there costs much, not
    infinitely much. Where an upper bound pushes mass onto classes 1e6 below the largest logit,
    log-probabilities are right to 1e-11, at 1e12 to 1e-4; beyond that, use `box_constrained_softmax`.
    `labels`: tensor or ndarray of shape (N,), class indices. `weights`: ndarray of shape (N,), how much each
    row counts in `nll`. `scores`: float64 ndarray of shape (N, K), each row less its largest logit,
    ascending. `label_scores`: float64 ndarray of shape (N,), the label's logit of each row less the largest.
    """

    def __init__(self, logits: Any, labels: Any, weights: Floats | None = None) -> None:
        given, indices = (
            array.detach().cpu().double().numpy() if hasattr(array, "detach") else array
            for array in (logits, labels)
        )
        scores, indices = np.array(given, dtype=np.float64, order="C"), np.asarray(indices).astype(np.int64)
        if scores.ndim != 2 or 0 in scores.shape or indices.shape != scores.shape[:1]:
            raise ValueError(
                f"expected logits (N, K) and labels (N,), got shapes {scores.shape} and {indices.shape}"
            )
        self.num_rows, self.num_classes = scores.shape
        top = scores.max(axis=1, keepdims=True)
        bad = ~np.isfinite(top[:, 0])
        if bad.any():
            raise ValueError(f"the logits of row {bad.argmax()} hold NaN or +inf, or nothing but -inf")
        wrong = (indices < 0) | (indices >= self.num_classes)
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(f"label {indices[row]} of row {row} is not one of {self.num_classes} classes")
        self.scores = scores
        self._weights = None if weights is None else weights / weights.sum()
        self.label_scores: Floats = np.empty(self.num_rows)
        self._cuts = open_cuts(self.scores)

        def prepare(rows: slice) -> None:
            for block in blocks(rows, self.num_classes):
                self._sort(block, top, indices)

        over_rows(prepare, self.num_rows, worth=scores.size > MANY)

    @cached_property
    def _sums(self) -> Floats:
        """For each sorted logit g_j of a row, the sum of exp(g_i - g_j) over i <= j; made when first read."""
        sums = np.empty_like(self.scores)
        over_rows(
            lambda rows: _running_sums(self.scores[rows], sums[rows]),
            self.num_rows,
            worth=self.scores.size > MANY,
        )
        return sums

    @cached_property
    def _log_scales(self) -> Floats:
        """Log of 1/Z of every row without bounds."""
        scales: Floats = -np.log(self._sums[:, -1])
        return scales

    def _sort(self, rows: slice, top: Floats, labels: NDArray[np.int64]) -> None:
        """Prepare a block of rows that fits into the processor's cache."""
        scores = self.scores[rows]
        scores -= top[rows]
        finite = np.isfinite(scores)
        if not finite.all():
            lowest = np.where(finite, scores, 0.0).min(axis=1, keepdims=True)
            scores[:] = np.where(finite, scores, lowest - UNDERFLOW)
        self.label_scores[rows] = np.take_along_axis(scores, labels[rows, None], axis=1)[:, 0]
        scores.sort(axis=1)

    def rows(self, index: NDArray[Any]) -> Self:
        """Keep some rows, given as indices or as a mask, without sorting them again."""
        part = copy(self)
        part.scores, part.label_scores = self.scores[index], self.label_scores[index]
        part._cuts = self._cuts[index]
        if "_sums" in self.__dict__:
            part._sums, part._log_scales = self._sums[index], self._log_scales[index]
        if self._weights is not None:
            part._weights = self._weights[index] / self._weights[index].sum()
        part.num_rows = len(part.scores)
        return part

    def nll(self, lower: float, upper: float) -> UniformNll:
        """Mean negative log-likelihood under one pair of bounds, with its gradient."""
        slack = sum_tolerance(self.num_classes)
        if not (
            0 <= lower <= (1 + slack) / self.num_classes and (1 - slack) / self.num_classes <= upper <= 1
        ):
            raise ValueError(
                f"uniform bounds ({lower}, {upper}) are infeasible for {self.num_classes} classes"
            )
        parts = np.empty((3, self.num_rows))
        arrays: Any = (self.scores, self._sums, self._log_scales, self.label_scores, self._cuts, *parts)
        over_rows(
            lambda rows: _label_log_probability(
                float(lower), float(upper), *(array[rows] for array in arrays)
            ),
            self.num_rows,
            worth=self.scores.size > MANY,
        )
        if self._weights is not None:
            return UniformNll(*(-parts @ self._weights).tolist())
        return UniformNll(*(-parts.sum(axis=1) / self.num_rows).tolist())


@compiled
def _running_sums(scores: Floats, sums: Floats) -> None:
    """Fill sums[n, j] with the sum over i <= j of exp(scores[n, i] - scores[n, j])."""
    for n in range(scores.shape[0]):
        sums[n, 0] = 1.0
        for j in range(1, scores.shape[1]):
            sums[n, j] = 1.0 + sums[n, j - 1] * math.exp(scores[n, j - 1] - scores[n, j])


@njit(error_model="numpy")
def one_each(classes: int) -> Floats:
    """Give what `solve_row` takes as `before` where each entry is one class."""
    return np.arange(classes + 1).astype(np.float64)


@njit(error_model="numpy")
def _balance(  # noqa: PLR0917 - compiled loops take arrays by position
    scores: Floats,
    sums: Floats,
    weights: Floats,
    before: Floats,
    first: int,
    end: int,
    lower: float,
    upper: float,
) -> tuple[float, float]:
    """Mass that the two bounds leave, and the log of 1/Z at which the classes between the cuts take it."""
    mass = 1.0 - before[first] * lower - (before[scores.shape[0]] - before[end]) * upper
    if mass <= 0.0 or end <= first:
        return mass, -math.inf
    if len(weights):
        return mass, math.log(mass / total_of(weights[first:end]))
    weight = sums[end - 1]
    if first > 0:
        weight -= sums[first - 1] * math.exp(scores[first - 1] - scores[end - 1])
    return mass, math.log(mass / weight) - scores[end - 1]


@njit(error_model="numpy")
def _cut(scores: Floats, threshold: float, guess: int) -> int:
    """First class whose score is not below the threshold, looked for in growing steps from a guess."""
    low, high, step = guess, guess, 1
    while low > 0 and scores[low - 1] >= threshold:
        high = low - 1
        low = max(0, low - step)
        step *= 2
    while high < scores.shape[0] and scores[high] < threshold:
        low = high + 1
        high = min(scores.shape[0], high + step)
        step *= 2
    while low < high:
        middle = (low + high) // 2
        if scores[middle] < threshold:
            low = middle + 1
        else:
            high = middle
    return low


@njit(error_model="numpy")
def solve_row(  # noqa: PLR0917 - as above
    scores: Floats,
    sums: Floats,
    weights: Floats,
    before: Floats,
    lower: float,
    upper: float,
    log_lower: float,
    log_upper: float,
    first: int,
    end: int,
) -> tuple[float, int, int, float]:
    """Log of 1/Z, the first class above its lower bound, the first at its upper bound, and the free mass.

    Either `sums`, as of `_running_sums`, or `weights`, exp(scores), is given; the other one is empty. An
    entry may stand for several classes, whose weights are added: `before` (entries + 1,) are the numbers of
    classes before each entry and in all.

    Newton's steps on log Z inside a bracket. They start from the cuts given: with those of bounds nearby, one
    pass confirms the answer.
    """
    classes = scores.shape[0]
    low_end, high_end = -UNDERFLOW, log_upper - scores[0]
    mass, log_scale = _balance(scores, sums, weights, before, first, end, lower, upper)
    by_newton = low_end <= log_scale <= high_end
    if not by_newton:
        log_scale = -math.log(total_of(weights) if len(weights) else sums[classes - 1])
    last_first, last_end = first, end
    for count in range(MAX_PASSES):
        first = _cut(scores, log_lower - log_scale, first)
        end = max(first, _cut(scores, log_upper - log_scale, end))
        if by_newton and first == last_first and end == last_end:
            break
        mass, newton = _balance(scores, sums, weights, before, first, end, lower, upper)
        if log_scale == newton or (end <= first and abs(mass) <= VERTEX):
            break
        if log_scale > newton if end > first else mass <= 0.0:
            high_end = min(high_end, log_scale)
        else:
            low_end = max(low_end, log_scale)
        middle = 0.5 * (low_end + high_end)
        if middle <= low_end or middle >= high_end:
            break
        by_newton = low_end <= newton <= high_end and not (count > 6 and count % 3 == 2)
        log_scale = newton if by_newton else middle
        last_first, last_end = first, end
    return log_scale, first, end, mass


@compiled
def _label_log_probability(  # noqa: PLR0917 - as above
    lower: float,
    upper: float,
    scores: Floats,
    sums: Floats,
    log_scales: Floats,
    label_scores: Floats,
    cuts: Cuts,
    value: Floats,
    by_lower: Floats,
    by_upper: Floats,
) -> None:
    """Fill each row's log-probability of its label and the derivatives in the bounds.

    `log_scales` (N,) are the logs of 1/Z without bounds. `cuts` (N, 2) holds where the last call found the
    cuts of each row, and is updated.
    """
    entries = classes = scores.shape[1]
    before = one_each(classes)
    a, b, log_a, log_b = lower, upper, math.log(lower) if lower > 0.0 else -math.inf, math.log(upper)
    for n in range(scores.shape[0]):
        by_lower[n] = by_upper[n] = 0.0
        is_at_lower, is_at_upper = a * classes >= 1.0, b * classes <= 1.0
        if not (is_at_lower or is_at_upper):
            log_scale = log_scales[n]
            if scores[n, 0] + log_scale >= log_a and log_scale <= log_b:
                value[n] = label_scores[n] + log_scale
                continue
            log_scale, first, end, mass = solve_row(
                scores[n], sums[n], scores[n, :0], before, a, b, log_a, log_b, cuts[n, 0], cuts[n, 1]
            )
            cuts[n, 0], cuts[n, 1] = first, end
            log_p = label_scores[n] + log_scale
            is_at_lower, is_at_upper = first > 0 and log_p < log_a, end < entries and log_p > log_b
        if is_at_lower:
            value[n], by_lower[n] = log_a, 1.0 / a
        elif is_at_upper:
            value[n], by_upper[n] = log_b, 1.0 / b
        else:
            value[n] = log_p
            if mass > 0.0:
                by_lower[n], by_upper[n] = -before[first] / mass, -(classes - before[end]) / mass
