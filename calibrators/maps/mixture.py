"""What methods with `mix+` before their name read: a mixture of the probabilities with the uniform one."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np

from boxcal.calibrators import array_ops
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.parameters import Array, Gradients, Parameters, Shapes, Values, Vjp
from boxcal.calibrators.maps.temperature import MANY, best_temperature
from boxcal.calibrators.threads import block_rows, over_blocks

TEMPERATURE, SHARE = "mixture_temperature", "mixture_share"
ENOUGH = 2_000
"""Rows that tell which of two temperatures is better, where there are many logits."""


class Mixture(LogitMap):
    """`T(g) = log((1 - e) softmax(g / temperature) + e / K)`, less the mean of each row.

    A probability of 0 then counts as what N samples can tell from 0: e is 1 / (N + 1), as in structured
    matrix scaling (Berta et al. 2025). The temperature is that of `ts` where an overconfident network would
    be cut off at 1, or 1 where true classes have the probability 0, which `ts` answers with an endless
    temperature: the one behind which `ts` is better. A fresh map changes nothing.
    """

    name = "mix"
    is_listed = False
    shapes: ClassVar[Shapes] = {TEMPERATURE: (), SHARE: ()}
    prepared = (TEMPERATURE, SHARE)
    positive = (TEMPERATURE,)

    @classmethod
    def of(cls, data: ValidationSet, samples: float) -> Self:
        """Give the mixture for a set that stands for so many samples."""
        share, temperatures = 1.0 / (samples + 1.0), (1.0, best_temperature(data)[0])
        tried = [cls(data.num_classes, {TEMPERATURE: one, SHARE: share}) for one in temperatures]
        if data.logits.size >= MANY and len(data) >= 2 * ENOUGH:
            data = data.rows(np.arange(0, len(data), len(data) // ENOUGH))
        return min(tried, key=lambda one: _tempered_nll(replace(data, logits=one.over(data.scores))))

    def fresh(self) -> dict[str, Any]:
        return {TEMPERATURE: 1.0, SHARE: 0.0}

    @property
    def share(self) -> float:
        """The share of the uniform distribution."""
        return float(self.parameters[SHARE].item())

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        if not self.share:
            return scores
        return ops.centred(ops.with_uniform(scores / p[TEMPERATURE], p[SHARE]))

    def vjp(self, p: Parameters, scores: Array, precomputed: Any = None) -> tuple[Array, Vjp]:
        """With s the softmax and q = (1 - e) s / ((1 - e) s + e / K): dT_k = q_k (dx_k - s.dx), x = g / T."""

        def back(by_mapped: Array, through: bool) -> tuple[Gradients, Array | None]:
            if not through or not self.share:
                return {}, by_mapped if through else None
            tempered = array_ops.softmax(scores / p[TEMPERATURE])
            kept = (1.0 - self.share) * tempered
            by_log = by_mapped - array_ops.mean(by_mapped)
            by_log *= kept / (kept + self.share / self.num_classes)
            return {}, (by_log - tempered * array_ops.row_sum(by_log)) / p[TEMPERATURE]

        return self.formula(array_ops, p, scores), back

    def invalid_reason(self) -> str | None:
        """Say so if the share is none."""
        if not 0.0 <= self.share < 1.0:
            return f"the share of a mixture is {self.share!r}"
        return super().invalid_reason()


def _tempered_nll(data: ValidationSet) -> float:
    """Give the mean NLL at the best temperature."""
    temperature = best_temperature(data)[0]

    def work(rows: slice) -> Any:
        log_p = array_ops.log_softmax(data.logits[rows] / temperature)
        losses = -np.take_along_axis(log_p, data.labels[rows, None], axis=1)[:, 0]
        return losses.sum() if data.weights is None else losses @ data.weights[rows]

    return float(sum(over_blocks(work, len(data), block_rows(data.num_classes)))) / len(data)
