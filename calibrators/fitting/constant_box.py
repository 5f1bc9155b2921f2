"""The fit of `pb`, `pb-lower` and `pb-upper`: each row is sorted once, then any box costs O(N log K).

The paper's own parameters hide a dead plateau: no probability exceeds `1 - (K - 1) a`, so an upper bound above that is
inert and its gradient exactly zero. Here `b = 1/K + (1 - 1/K) (1 - a K) (1 - slack)`, which is never inert,
and the search runs in `log(a K)` and `log(slack)`, where the optimum is well scaled for any K.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from torch import Tensor

from calibrators.fitting import kernels
from calibrators.fitting.descent import Limits, Minimum, best_of

Array = np.ndarray[Any, Any]
Sides = Literal["both", "lower", "upper"]

NARROWEST, WIDEST = math.log(1e-12), math.log(1.0 - 1e-9)
GRID_SAMPLES = 1000
HOP_WORK = 1_000_000
"""Samples times evaluations that hops around the optimum may cost."""


class SortedRows:
    """Validation rows prepared for `sorted_nll`: weights in descending order, tail sums, the label's place.

    Takes two float64 copies of the logits (N, K). Gaps beyond 700 nats to a row's maximum count as 700.
    """

    def __init__(self, scores: Tensor, labels: Tensor) -> None:
        z, y = scores.numpy(), labels.numpy()
        own = np.take_along_axis(z, y[:, None], axis=1)
        self.ranks = (z > own).sum(axis=1)
        self.gaps = own[:, 0] - z.max(axis=1)
        self.weights = -z
        self.weights.sort(axis=1)
        self.tails = np.empty((z.shape[0], z.shape[1] + 1))
        kernels.weigh(self.weights, self.tails)
        self.num_samples, self.num_classes = z.shape

    def nll(self, lower: float, upper: float) -> tuple[float, float, float]:
        """Mean loss under a scalar box, and its derivatives in the lower and the upper bound."""
        answer: tuple[float, float, float] = kernels.sorted_nll(
            self.weights, self.tails, self.ranks, self.gaps, lower, upper
        )
        return answer

    def part(self, rows: Array) -> SortedRows:
        """Keep only some rows."""
        some = object.__new__(SortedRows)
        some.weights, some.tails = self.weights[rows], self.tails[rows]
        some.ranks, some.gaps = self.ranks[rows], self.gaps[rows]
        some.num_samples, some.num_classes = len(rows), self.num_classes
        return some


def box_at(fraction: float, slack: float, num_classes: int) -> tuple[float, float]:
    """Give (lower, upper) for `fraction = lower * K` and the share of the upper bound's range left out."""
    lower = fraction / num_classes
    upper = 1.0 / num_classes + (1.0 - 1.0 / num_classes) * (1.0 - fraction) * (1.0 - slack)
    return lower, min(1.0, max(upper, 1.0 / num_classes))


def fit_box(
    rows: SortedRows, sides: Sides, *, seed: int, tick: Callable[[float], None] | None = None
) -> tuple[float, float, Minimum]:
    """Find the scalar box of least validation NLL.

    Returns
    -------
    lower, upper : float
        0 and 1 where no bound is better.
    minimum : Minimum
        In coordinates (log of lower * K, log of slack), or the one of them that the sides leave.
    """
    K = rows.num_classes
    use_lower, use_upper = sides != "upper", sides != "lower"

    def split(coordinates: Array) -> tuple[float, float]:
        fraction = math.exp(coordinates[0]) if use_lower else 0.0
        slack = math.exp(coordinates[-1]) if use_upper else 0.0
        return fraction, slack

    def box(coordinates: Array) -> tuple[float, float]:
        fraction, slack = split(coordinates)
        return (fraction / K, 1.0) if not use_upper else box_at(fraction, slack, K)

    def loss_of(data: SortedRows) -> Callable[[Array], tuple[float, Array]]:
        def loss(coordinates: Array) -> tuple[float, Array]:
            fraction, slack = split(coordinates)
            value, d_lower, d_upper = data.nll(*box(coordinates))
            gradient = []
            if use_lower:
                inert = 0.0 if not use_upper else d_upper * (1 - 1 / K) * (1 - slack)
                gradient.append(fraction * (d_lower / K - inert))
            if use_upper:
                gradient.append(-slack * d_upper * (1 - 1 / K) * (1 - fraction))
            return value, np.array(gradient)

        return loss

    dimensions = use_lower + use_upper
    limits: Limits = [(NARROWEST, WIDEST)] * dimensions
    starts = _grid_starts(rows, loss_of, dimensions, seed)
    hops = int(np.clip(HOP_WORK / (15 * rows.num_samples), 4, 64))
    minimum = best_of(loss_of(rows), starts, limits, hops=hops, seed=seed, tick=tick)
    lower, upper = box(minimum.coordinates)
    plainer = [(0.0, 1.0), (0.0, upper), (lower, 1.0)]
    for candidate in plainer:
        if rows.nll(*candidate)[0] <= minimum.value + 1e-12:
            return *candidate, minimum
    return lower, upper, minimum


def _grid_starts(
    rows: SortedRows, loss_of: Callable[[SortedRows], Any], dimensions: int, seed: int
) -> list[Array]:
    """Look over the whole plane on a sample of the rows, and start from its lowest, mutually distant points."""
    chosen = np.random.default_rng(seed).permutation(rows.num_samples)[:GRID_SAMPLES]
    loss = loss_of(rows.part(np.sort(chosen)))
    axis = np.log(np.geomspace(1e-8, 0.95, 22))
    points = np.stack(np.meshgrid(*[axis] * dimensions, indexing="ij"), axis=-1).reshape(-1, dimensions)
    values = np.array([loss(point)[0] for point in points])
    starts: list[Array] = []
    for index in np.argsort(values, kind="stable"):
        if all(np.abs(points[index] - other).max() > 2.0 for other in starts):
            starts.append(points[index])
        if len(starts) == 4:
            break
    return starts
