"""Rows of logits, sorted once, for their losses when each row has a temperature and bounds of its own."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np

from boxcal.calibrators.fitting import loops
from boxcal.calibrators.operator.uniform import SortedRows
from boxcal.calibrators.threads import SMALL, over_rows

Array = np.ndarray[Any, Any]

WIDEST = 1000.0
"""Times their mean that logits may be below the largest of their row in float32, which has seven digits."""


class TemperedRows:
    """Losses of the labels of some rows.

    Parameters
    ----------
    sorted_rows : SortedRows
        N rows of K logits.
    """

    def __init__(self, sorted_rows: SortedRows) -> None:
        self.scores, self.own, self.unit = sorted_rows.scores, sorted_rows.label_scores, 1.0
        self.cuts = np.tile(np.array([0, sorted_rows.num_classes], np.int32), (sorted_rows.num_rows, 1))

    def rough(self) -> Self:
        """Compute in float32, seven digits and half the time, unless some logits are far below the others.

        Logits are in units of their mean, so that those of another scale are rounded to the same numbers.
        """
        part = copy.copy(self)
        mean = -float(self.scores.mean())
        if 0.0 < -float(self.scores.min()) <= WIDEST * mean:
            part.unit = self.unit * mean
            part.scores, part.own = (self.scores / mean).astype(np.float32), self.own / mean
        return part

    def rows(self, index: Array) -> Self:
        """Look only at some rows, given as indices or as a mask."""
        part = copy.copy(self)
        part.scores, part.own, part.cuts = self.scores[index], self.own[index], self.cuts[index]
        return part

    def losses(self, inverse: Array, lower: Array, upper: Array) -> list[Array]:
        """Give every row's loss, and its derivatives in 1 / temperature and in both bounds, each (N,).

        Parameters
        ----------
        inverse, lower, upper : ndarray
            (N,) float64: 1 / temperature and bounds of every row.
        """
        answer = np.empty((len(inverse), 4))
        arrays = (self.scores, self.own, self.unit * inverse, lower, upper, self.cuts, answer)

        def work(rows: slice) -> None:
            loops.tempered_in_box(*(array[rows] for array in arrays))

        over_rows(work, len(inverse), worth=self.scores.size > SMALL)
        answer[:, 1] *= self.unit
        return list(answer.T)
