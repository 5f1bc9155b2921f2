"""The fit of `lb`: each row is sorted once, then any pair of clip limits costs O(N log K).

Compiled loops of the fit of `lb`: the loss of clipped logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.fitting.descent import Minimum, best_of, descend, distinct, local_minima
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.operator.compiling import compiled

Array = np.ndarray[Any, Any]


@compiled
def running_weights(ascending: Array, sums: Array) -> None:
    """Fill sums (N, K + 1) with the sums of exp(z) of the classes before each, z <= 0 ascending."""
    for n in range(ascending.shape[0]):
        sums[n, 0] = 0.0
        for k in range(ascending.shape[1]):
            sums[n, k + 1] = sums[n, k] + math.exp(max(ascending[n, k], -700.0))


@compiled
def clipped_nll(  # noqa: PLR0917 - compiled loops take arrays by position
    ascending: Array,
    sums: Array,
    own: Array,
    norms: Array,
    weights: Array,
    lower: float,
    upper: float,
) -> tuple[float, float, float]:
    """Mean loss of softmax(clip(z, lower |z|, upper |z|)), and its derivatives in lower and upper.

    `ascending` (N, K) are rows of z, in which 0 is the largest entry, `sums` their running weights, `own`
    (N,) the label's entry of them, `norms` (N,) the rows' norms and `weights` (N,), of mean 1, how much each
    counts.
    """
    count, size = ascending.shape
    loss, d_lower, d_upper = 0.0, 0.0, 0.0
    for n in range(count):
        row, weight = ascending[n], weights[n]
        low = max(lower * norms[n], -700.0)
        high = max(upper * norms[n], -700.0)
        first = int(np.searchsorted(row, low))
        end = max(int(np.searchsorted(row, high)), first)
        at_low, at_high = first * math.exp(min(low, 0.0)), (size - end) * math.exp(min(high, 0.0))
        if low > 0.0:  # every class is below: all are equal
            loss += weight * math.log(size)
            continue
        total = at_low + (sums[n, end] - sums[n, first]) + at_high
        by_low, by_high = at_low / total, at_high / total
        if own[n] < low:
            loss -= weight * low
            by_low -= 1.0
        elif own[n] > high:
            loss -= weight * high
            by_high -= 1.0
        else:
            loss -= weight * own[n]
        loss += weight * math.log(total)
        d_lower += weight * (by_low * norms[n])
        d_upper += weight * (by_high * norms[n])
    return loss / count, d_lower / count, d_upper / count


SAMPLES = 500, 2000
"""Rows that the grid looks at, and rows that the first descents look at."""
DISTANT = 0.04
FLAT = 1e-9
"""Grid points whose loss is so close to the unclipped one lie on its plateau, where no descent can start."""
PLACES, LOCAL_MINIMA = 80, 2
"""Points evaluated along each axis through the best end, on all rows, and descents from the minima there."""
PERTURBATIONS, REACH = 40, 0.1
"""Descents around the best end, and how far the first of them begin from it."""


class SortedLogits:
    """Validation rows prepared for `clipped_nll`; takes two float64 copies of the logits (N, K)."""

    def __init__(self, scores: Array, labels: Array, weights: Array | None = None) -> None:
        self.weights = np.ones(len(labels)) if weights is None else weights / weights.mean()
        self.ascending = scores - scores.max(axis=1, keepdims=True)
        self.norms = np.linalg.norm(self.ascending, axis=1)
        self.own = np.take_along_axis(self.ascending, labels[:, None], axis=1)[:, 0]
        self.ascending.sort(axis=1)
        self.sums = np.empty((scores.shape[0], scores.shape[1] + 1))
        running_weights(self.ascending, self.sums)

    def __call__(self, coordinates: Array) -> tuple[float, Array]:
        """Mean loss and gradient at (lower, share): the upper limit is `lower + (1 - lower) share`."""
        lower, share = coordinates
        upper = lower + (1.0 - lower) * share
        value, by_lower, by_upper = clipped_nll(
            self.ascending, self.sums, self.own, self.norms, self.weights, lower, upper
        )
        return value, np.array([by_lower + by_upper * (1.0 - share), by_upper * (1.0 - lower)])


def fit_limits(
    logit_map: LogitMap, data: ValidationSet, *, seed: int, thorough: bool, tick: Callable[[float], None]
) -> Minimum:
    """Find the limits of least validation NLL, in the coordinates of `LogitBounding` and within its own.

    A search that is not thorough makes no perturbations around the optimum.
    """
    z, y, weights, within = data.scores, data.labels, data.weights, logit_map.limits()
    order = np.random.default_rng(seed).permutation(len(y))
    few, some = (
        SortedLogits(z[rows], y[rows], None if weights is None else weights[rows])
        for rows in (np.sort(order[:count]) for count in SAMPLES)
    )
    lowers, shares = np.linspace(-1.0, 0.95, 40), np.linspace(0.0, 1.0, 26)
    points = np.stack(np.meshgrid(lowers, shares, indexing="ij"), axis=-1).reshape(-1, 2)
    values = np.array([few(point)[0] for point in points])
    clips = np.abs(values - few(np.array([-1.0, 1.0]))[0]) > FLAT
    points, values = points[clips], values[clips]
    lowest = distinct(points[np.argsort(values, kind="stable")], DISTANT, 10) or [np.array([-1.0, 1.0])]
    ends = sorted((descend(some, start, within) for start in lowest), key=lambda end: end[1])
    starts = distinct([end[0] for end in ends], DISTANT / 8, 4)
    loss = SortedLogits(z, y, weights)
    starts[0] = descend(loss, starts[0], within)[0]
    starts += _along_the_axes(loss, starts[0])
    perturbations = PERTURBATIONS if thorough else 0
    return best_of(loss, starts, within, perturbations=perturbations, reach=REACH, seed=seed, tick=tick)


def _along_the_axes(loss: SortedLogits, best: Array) -> list[Array]:
    """Find the lowest minima of the loss on all rows in each limit, the other fixed at the best point.

    A gain on a few rare rows is not visible in a sample of the rows.
    """
    lower, share = best
    upper = lower + (1.0 - lower) * share
    lowers = np.linspace(-1.0, min(upper, 1.0 - 1e-6), PLACES)
    uppers = np.linspace(lower, 1.0, PLACES)
    lines = (
        np.column_stack([lowers, (upper - lowers) / (1.0 - lowers)]),
        np.column_stack([np.full(PLACES, lower), (uppers - lower) / (1.0 - lower)]),
    )
    return [
        minimum
        for line in lines
        for minimum in local_minima(loss, np.clip(line, (-1.0, 0.0), (1.0, 1.0)), LOCAL_MINIMA)
    ]
