"""The rows that objectives are evaluated on, and their losses under bounds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from typing import Any, Self

import numpy as np

from boxcal.calibrators.array_ops import top_columns
from boxcal.calibrators.fitting import loops
from boxcal.calibrators.operator.uniform import SortedRows, open_cuts
from boxcal.calibrators.threads import SMALL, block_rows, over_blocks, over_rows

Array = np.ndarray[Any, Any]


def mean_of(losses: Array, weights: Array | None) -> float:
    """Mean of some losses (N,), with weights (N,) of mean 1 if there are any."""
    return float((losses if weights is None else losses * weights).mean())


def dense_loss(scores: Array, labels: Array, lower: Array, upper: Array) -> tuple[Array, Array, Array, Array]:
    """Loss of every row under its own box, and the derivatives in scores, lower and upper.

    Shapes: scores (N, K); labels, lower, upper (N,); returns (N,), (N, K), (N,), (N,).
    """
    losses, by_lower, by_upper = np.empty((3, len(scores)))
    by_scores = np.empty(scores.shape)
    loops.nll_rows(scores, labels, lower, upper, losses, by_scores, by_lower, by_upper)
    return losses, by_scores, by_lower, by_upper


def losses_of(
    source: Array,
    labels: Array,
    mapped: Callable[[Array], Array],
    box: Callable[[Array], tuple[Array, Array]],
) -> Array:
    """Loss (N,) of every row of `mapped(source)` under `box` of it, in blocks of rows.

    `source`: (N, ...) of any dtype. `labels`: (N,) int64. `mapped`: maps rows of the source, each by itself,
    to logits (n, K). `box`: gives lower and upper bound of mapped rows, each () or (n, 1).
    """

    def work(rows: slice) -> Array:
        scores = np.ascontiguousarray(mapped(source[rows]), np.float64)
        lower, upper = (np.broadcast_to(bound, (len(scores), 1))[:, 0].copy() for bound in box(scores))
        return dense_loss(scores, labels[rows], lower, upper)[0]

    width = int(np.prod(source.shape[1:]))
    return np.concatenate(list(over_blocks(work, len(labels), block_rows(width))))


class TemperedRows:
    """Losses of the labels of rows sorted once, under a temperature and bounds of each row's own."""

    def __init__(self, sorted_rows: SortedRows) -> None:
        self.scores, self.own = sorted_rows.scores, sorted_rows.label_scores
        self.cuts = open_cuts(self.scores)

    def rows(self, index: Array) -> Self:
        """Keep some rows, given as indices or as a mask."""
        part = copy.copy(self)
        part.scores, part.own, part.cuts = self.scores[index], self.own[index], self.cuts[index]
        return part

    def losses(self, inverse: Array, lower: Array, upper: Array) -> list[Array]:
        """Give every row's loss, and its derivatives in 1 / temperature and in both bounds, each (N,).

        `inverse`, `lower`, `upper`: (N,) float64: 1 / temperature and bounds of every row.
        """
        answer = np.empty((len(inverse), 4))
        arrays = (self.scores, self.own, inverse, lower, upper, self.cuts, answer)
        over_rows(
            lambda rows: loops.tempered_in_box(*(array[rows] for array in arrays)),
            len(inverse),
            worth=self.scores.size > SMALL,
        )
        return list(answer.T)


class FitRows:
    """Rows of a validation set; what objectives need of them is computed once, for all objectives.

    `scores`: (N, K) float64 logits, (N, D) features, or (N, ...) inputs. `labels`: (N,) int64. `weights`:
    (N,) float64, of mean 1.
    """

    def __init__(self, scores: Array, labels: Array, weights: Array | None = None) -> None:
        self.scores, self.labels, self.weights = scores, labels, weights

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def sorted(self) -> SortedRows:
        """The logits sorted along the classes."""
        return SortedRows(self.scores, self.labels, self.weights)

    @cached_property
    def tempered(self) -> TemperedRows:
        """The sorted logits, for temperatures of each row's own."""
        return TemperedRows(self.sorted)

    @cached_property
    def columns(self) -> Array:
        """The ten largest logits of each row less the mean of all, (T, N)."""
        return top_columns(self.scores)[0]

    def rows(self, index: Array) -> FitRows:
        """Keep some rows, given as indices or as a mask; what was computed of them is kept too."""
        weights = None
        if self.weights is not None:
            weights = self.weights[index] / self.weights[index].mean()
        part = FitRows(self.scores[index], self.labels[index], weights)
        if "tempered" in self.__dict__:
            part.tempered = self.tempered.rows(index)
        if "columns" in self.__dict__:
            part.columns = np.ascontiguousarray(self.columns[:, index])
        return part
