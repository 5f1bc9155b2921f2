"""The fit of `dpb`: a compiled loss, and a search most of which is in float32 and on some of the rows.

The loss has a kink wherever a weighted logit reaches the threshold, and classes whose weighted logits all
stay below it have a gradient of zero. Descents end there; those from points around the best end go on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.fitting import loops
from boxcal.calibrators.fitting.descent import AGREE_WITHIN, Minimum, descend, projected_gradient
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.parameters import Array
from boxcal.calibrators.threads import SMALL, over_rows

LARGEST_IN_FLOAT32 = 1000.0
"""Larger logits are not computed with in float32, which has seven digits."""
ROWS, ROUGH = 2000, 40
"""Rows on which all starts are compared, and iterations for each of them."""
AROUND, REACH, NARROWING = 8, 0.5, 0.02
"""Descents around the best end, how far the first of them begins from it, and the last, relative to that."""
FULL, SHORT = 100, 25
"""Iterations on all rows from the best start, and from each point around its end."""
LAST = 500
"""Iterations in float64 at the end."""


class DualLoss:
    """Mean loss of `dpb` over its coordinates, in one pass over each row.

    The general objective takes more than twice as long.

    `scores`: (N, K) float64. `labels`: (N,) int64. `weights`: (N,) float64, of mean 1.
    """

    def __init__(self, scores: Array, labels: Array, weights: Array | None = None) -> None:
        self.scores, self.labels = scores, labels
        self.counts = np.ones(len(labels)) if weights is None else weights
        self.precision: type[np.floating[Any]] = np.float64

    def rows(self, index: Array) -> Self:
        part = copy.copy(self)
        part.scores, part.labels, part.counts = self.scores[index], self.labels[index], self.counts[index]
        part.counts = part.counts / part.counts.mean()
        return part

    def in_float32(self) -> Self:
        """Compute in float32, which takes half the time, unless the logits are too large for it."""
        part = copy.copy(self)
        if float(np.abs(self.scores).max()) <= LARGEST_IN_FLOAT32:
            part.scores, part.precision = self.scores.astype(np.float32), np.float32
        return part

    def __call__(self, coordinates: Array) -> tuple[float, Array]:
        """Return the mean loss and its gradient."""
        weights, threshold = (
            coordinates[:-1].astype(self.precision),
            self.precision(math.exp(coordinates[-1])),
        )

        def work(rows: slice) -> Array:
            answer = np.zeros(len(coordinates) + 1)
            own = self.scores[rows], self.labels[rows], self.counts[rows]
            loops.dual_bounded(*own, weights, threshold, answer)
            return answer

        parts = over_rows(work, len(self.scores), worth=self.scores.size > SMALL)
        value, *gradient = np.sum(parts, axis=0) / len(self.scores)
        gradient[-1] *= threshold
        return float(value), np.array(gradient)


def fit_shift(
    logit_map: LogitMap, data: ValidationSet, *, seed: int, thorough: bool, tick: Callable[[float], None]
) -> Minimum:
    """Find weights and a threshold of low validation NLL.

    A search that is not thorough follows fewer starts and makes fewer descents around the best end.
    """
    objective, limits = DualLoss(data.scores, data.labels, data.weights), logit_map.limits()
    starts, rng = logit_map.starts(), np.random.default_rng(seed)
    every = objective.in_float32()
    some = every.rows(rng.permutation(len(data))[:ROWS])
    count, around = (len(starts), AROUND) if thorough else (len(starts) // 2, AROUND // 2)
    steps, used = count + around + 2, 0
    ends = []
    for place, start in enumerate(starts[:count]):
        end, value, calls = descend(some, start, limits, iterations=ROUGH, tolerance=1e-7)
        ends.append((end, value))
        used += calls
        tick((place + 1) / steps)
    best, lowest = min(ends, key=lambda pair: pair[1])
    agreeing = sum(value <= lowest + AGREE_WITHIN for _, value in ends)
    best, lowest, calls = descend(every, best, limits, iterations=FULL, tolerance=1e-8)
    used += calls
    low, high = np.array(limits, dtype=np.float64).T
    for index in range(around):
        step = rng.uniform(-REACH, REACH, len(best)) * NARROWING ** (index / around)
        end, value, calls = descend(
            every, np.clip(best + step, low, high), limits, iterations=SHORT, tolerance=1e-8
        )
        used += calls
        if value < lowest:
            best, lowest = end, value
        tick((count + index + 2) / steps)
    best, lowest, calls = descend(
        objective, best, limits, iterations=LAST, tolerance=1e-14 if thorough else 1e-9
    )
    spread = max(value for _, value in ends) - min(value for _, value in ends)
    return Minimum(
        best, lowest, projected_gradient(objective, best, limits), count, agreeing, used + calls, spread
    )
