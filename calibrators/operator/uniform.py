"""The operator under uniform bounds, evaluated for many bounds on the same rows: what fits of bounds use.

Each row is sorted once. Any pair (lower, upper) then costs O(log K) per row, with the closed-form gradient of
the label's log-probability, where the general operator costs O(K).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.operator import uniform_kernel
from boxcal.calibrators.operator.bounds import sum_tolerance
from boxcal.calibrators.operator.torch_solver import UNDERFLOW
from boxcal.calibrators.threads import over_rows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

BLOCK = 1 << 16
"""Entries that are sorted at a time: half a megabyte."""
MANY = 500_000
"""Entries above which the rows are shared among threads."""


class LabelLogProbability(NamedTuple):
    """Log-probability of each row's label, and its derivatives in the row's two bounds.

    Attributes
    ----------
    value, by_lower, by_upper : float64 ndarray of shape (N,)
    """

    value: Floats
    by_lower: Floats
    by_upper: Floats


class UniformNll(NamedTuple):
    """Mean negative log-likelihood of the labels, and its derivatives in the two bounds."""

    value: float
    by_lower: float
    by_upper: float


class SortedRows:
    """Logits sorted along the classes, ready to be put under any uniform bounds.

    With w = exp(g) in ascending order and T_j the sum of w up to j, BCSoftmax(g; a, b) under the same a and b
    for every class gives b to the last classes, a to the first, and in between w times what mass is left,
    divided by T_j - T_i. Where the two cuts lie follows from log Z by a search that starts at those of the
    bounds asked for before, so that Newton on log Z never looks at a whole row again, and bounds near the
    last ones cost next to nothing. One thread at a time may ask.

    Two float64 arrays of the logits' shape are kept: 0.8 GB for N = 50,000 and K = 1000.

    Parameters
    ----------
    logits : Tensor or ndarray of shape (N, K)
        Without NaN and +inf, at least one finite logit in each row. A logit of -inf counts as one 800 below
        the row's lowest finite one, so that a label there costs much, not infinitely much.
        Scores are measured from the row's largest logit: where an upper bound pushes mass onto classes 1e6
        below it, log-probabilities are right to 1e-11, at 1e12 to 1e-4; beyond that, ask the operator itself.
    labels : Tensor or ndarray of shape (N,)
        Class indices.

    Attributes
    ----------
    scores : float64 ndarray of shape (N, K)
        Each row less its largest logit, ascending.
    label_scores : float64 ndarray of shape (N,)
        What became of the label's logit.

    Raises
    ------
    ValueError
        Naming the row whose logits or label do not serve.
    """

    def __init__(self, logits: Tensor | NDArray[np.floating], labels: Tensor | NDArray[np.integer]) -> None:
        scores = np.array(_as_array(logits), dtype=np.float64, order="C")
        indices = np.asarray(_as_array(labels)).astype(np.int64)
        if scores.ndim != 2 or 0 in scores.shape or indices.shape != scores.shape[:1]:
            raise ValueError(
                f"expected logits (N, K) and labels (N,), got shapes {scores.shape} and {indices.shape}"
            )
        self.num_rows, self.num_classes = scores.shape
        top = scores.max(axis=1, keepdims=True)
        bad = ~np.isfinite(top[:, 0])
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(f"the logits of row {row} hold NaN or +inf, or nothing but -inf")
        wrong = (indices < 0) | (indices >= self.num_classes)
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(f"label {indices[row]} of row {row} is not one of {self.num_classes} classes")
        self.scores = scores
        self._sums: Floats = np.empty_like(scores)
        self.label_scores: Floats = np.empty(self.num_rows)
        self._cuts: uniform_kernel.Cuts = np.tile(
            np.array([0, self.num_classes], np.int32), (self.num_rows, 1)
        )

        def prepare(rows: slice) -> None:
            block = max(1, BLOCK // self.num_classes)
            for begin in range(rows.start, rows.stop, block):
                self._sort(slice(begin, min(begin + block, rows.stop)), top, indices)

        over_rows(prepare, self.num_rows, worth=scores.size > MANY)

    def _sort(self, rows: slice, top: Floats, labels: NDArray[np.int64]) -> None:
        """Prepare a block of rows while it lies in the processor's cache."""
        scores = self.scores[rows]
        scores -= top[rows]
        finite = np.isfinite(scores)
        if not finite.all():
            lowest = np.where(finite, scores, 0.0).min(axis=1, keepdims=True)
            scores[:] = np.where(finite, scores, lowest - UNDERFLOW)
        self.label_scores[rows] = np.take_along_axis(scores, labels[rows, None], axis=1)[:, 0]
        scores.sort(axis=1)
        uniform_kernel.running_sums(scores, self._sums[rows])

    def log_probability(self, lower: float | Floats, upper: float | Floats) -> LabelLogProbability:
        """Log-probability of each row's label under its row's bounds.

        Parameters
        ----------
        lower, upper : number or ndarray of shape (N,)
            0 <= lower <= 1/K <= upper <= 1, up to rounding.

        Raises
        ------
        ValueError
            Naming the row whose bounds are infeasible.
        """
        low = np.broadcast_to(np.asarray(lower, dtype=np.float64), (self.num_rows,))
        high = np.broadcast_to(np.asarray(upper, dtype=np.float64), (self.num_rows,))
        slack = sum_tolerance(self.num_classes)
        feasible = (low >= 0) & (low * self.num_classes <= 1 + slack)
        feasible &= (high <= 1) & (high * self.num_classes >= 1 - slack)
        if not feasible.all():
            row = int(feasible.argmin())
            raise ValueError(
                f"uniform bounds ({float(low[row])}, {float(high[row])}) of row {row} are infeasible"
                f" for {self.num_classes} classes"
            )
        result = LabelLogProbability(*(np.empty(self.num_rows) for _ in range(3)))

        def solve(rows: slice) -> None:
            uniform_kernel.label_log_probability(
                self.scores[rows],
                self._sums[rows],
                self.label_scores[rows],
                low[rows],
                high[rows],
                self._cuts[rows],
                *(part[rows] for part in result),
            )

        over_rows(solve, self.num_rows, worth=self.scores.size > MANY)
        return result

    def nll(self, lower: float, upper: float) -> UniformNll:
        """Mean negative log-likelihood under one pair of bounds, with its gradient."""
        value, by_lower, by_upper = self.log_probability(lower, upper)
        return UniformNll(-float(value.mean()), -float(by_lower.mean()), -float(by_upper.mean()))


def _as_array(values: Tensor | NDArray[np.generic]) -> NDArray[np.generic]:
    """Look at a tensor as an array, without copying it where its dtype allows."""
    if not isinstance(values, Tensor):
        return values
    values = values.detach().cpu()
    return (values.float() if values.dtype is torch.bfloat16 else values).numpy()
