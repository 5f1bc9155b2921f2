"""The objective of `ts+lb` and `pts+lb` in closed form: clipped logits, divided by the row's temperature.

Logit bounding clips to multiples of the row's norm, so it does not matter which of the two comes first.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from torch import Tensor

from boxcal.calibrators.fitting import loops
from boxcal.calibrators.fitting.joint import JointObjective, mean_of
from boxcal.calibrators.fitting.row_parts import Temperatures
from boxcal.calibrators.formulas import TOP
from boxcal.calibrators.logit_maps.chain import Chain
from boxcal.calibrators.threads import SMALL, over_rows

Array = np.ndarray[Any, Any]


class ClippedLogits(JointObjective):
    """`ts`, `pts` or the identity, and then `lb`.

    Parameters
    ----------
    chain : Chain
        Of the two maps.
    source : Tensor
        (N, K) float64 logits.
    labels : Tensor
        (N,) int64.
    weights : Tensor, optional
        (N,) float64, of mean 1.
    """

    def __init__(self, chain: Chain, source: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        super().__init__(chain, None, source, labels, weights)
        top = source.topk(min(TOP, source.shape[1]), dim=1).values.numpy().T
        columns = np.ascontiguousarray(top - source.mean(dim=1).numpy())
        self.temperatures = Temperatures(chain.first, columns)
        self.scores = source.contiguous().numpy()
        self.norms, self.largest = np.linalg.norm(self.scores, axis=1), top[0].copy()
        self.first_size = chain.first.size

    def rows(self, index: Tensor) -> Self:
        """Look only at some rows."""
        part, at = self.shallow(index), index.numpy()
        part.temperatures = self.temperatures.rows(at)
        part.scores, part.norms, part.largest = self.scores[at], self.norms[at], self.largest[at]
        return part

    def __call__(self, coordinates: Array) -> tuple[float, Array]:
        """Return the mean loss and its gradient."""
        own, (low, share) = coordinates[: self.first_size], coordinates[self.first_size :]
        with np.errstate(over="ignore", invalid="ignore"):
            inverse, to_temperature = self.temperatures(own)
        if not np.isfinite(inverse).all():
            return np.inf, np.zeros_like(coordinates)
        answer = np.empty((len(self.labels), 4))
        limits = low, low + (1.0 - low) * share

        def work(rows: slice) -> None:
            given = self.scores[rows], self.labels[rows], self.norms[rows], self.largest[rows], inverse[rows]
            loops.clipped_and_tempered(*given, *limits, answer[rows])

        over_rows(work, len(answer), worth=self.scores.size > SMALL)
        value = mean_of(answer[:, 0], self.weights)
        if self.weights is not None:
            answer *= self.weights[:, None]
        if self.pseudo_sample:
            cost = self.temperatures.gaps / len(answer)
            value += float((cost * inverse).mean())
            answer[:, 1] += cost
        by_low, by_high = answer[:, 2].sum(), answer[:, 3].sum()
        by_limits = [by_low + by_high * (1.0 - share), by_high * (1.0 - low)]
        return value, np.concatenate([to_temperature(answer[:, 1]), by_limits]) / len(answer)
