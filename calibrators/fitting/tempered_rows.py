"""Rows of logits, sorted once, for their losses when each row has a temperature and bounds of its own."""

from __future__ import annotations

import copy
from typing import Any, Self

import numpy as np

from boxcal.calibrators.fitting import loops
from boxcal.calibrators.operator.shortening import shorten
from boxcal.calibrators.operator.uniform import SortedRows, open_cuts
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
        self.counts = sorted_rows.counts
        self.cuts = open_cuts(self.scores)

    def rough(self) -> Self:
        """Compute in float32, seven digits and half the time, unless some logits are far below the others.

        Logits are in units of their mean, so that those of another scale are rounded to the same numbers.
        With many classes, rows are shortened too.
        """
        part, mean = copy.copy(self), -float(self.scores.mean())
        if 0.0 < -float(self.scores.min()) <= WIDEST * mean:
            scores, counts = shorten(self.scores, self.counts) or (self.scores, self.counts)
            part.unit, part.own = self.unit * mean, self.own / mean
            part.scores, part.counts = (scores / mean).astype(np.float32), counts.astype(np.float32)
            part.cuts = open_cuts(part.scores)
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
        arrays = (self.own, self.unit * inverse, lower, upper, self.cuts, answer)

        def work(rows: slice) -> None:
            loops.tempered_in_box(self.scores[rows], self.counts, *(array[rows] for array in arrays))

        over_rows(work, len(inverse), worth=self.scores.size > SMALL)
        answer[:, 1] *= self.unit
        return list(answer.T)
