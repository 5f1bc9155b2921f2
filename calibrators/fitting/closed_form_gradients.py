"""Closed-form derivatives of `ts`, `pts`, `ets` and `dpb`: by autograd they take 2.4 to 6.8 times as long.

They give what `JointObjective` gives at the same coordinates. Autograd sees only vectors of N entries: the
temperatures and the bounds of the rows, which a small network may set.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.fitting import loops
from boxcal.calibrators.fitting.joint import JointObjective, call
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.logit_maps.dual_bounding import DualProbabilityBounding
from boxcal.calibrators.logit_maps.ensemble_temperature import SMALLEST, EnsembleTemperatureScaling
from boxcal.calibrators.logit_maps.identity import Identity
from boxcal.calibrators.logit_maps.temperature import RowTemperature
from boxcal.calibrators.network import TOP
from boxcal.calibrators.operator.uniform import SortedRows
from boxcal.calibrators.threads import SMALL, over_rows

Array = np.ndarray[Any, Any]


def objective_of(
    logit_map: LogitMap, bound_map: BoundMap | None, source: Tensor, labels: Tensor
) -> JointObjective:
    """Give the objective of a fit: in closed form where the maps have one, else by autograd."""
    kind: type[JointObjective] = JointObjective
    if isinstance(logit_map, Identity | RowTemperature):
        kind = RowTemperatureObjective
    elif bound_map is None and isinstance(logit_map, EnsembleTemperatureScaling):
        kind = Ensemble
    elif bound_map is None and isinstance(logit_map, DualProbabilityBounding):
        kind = DualBounding
    return kind(logit_map, bound_map, source, labels)


class RowTemperatureObjective(JointObjective):
    """`ts`, `pts` or the identity, alone or under bounds; the rows are sorted once."""

    def __init__(
        self, logit_map: LogitMap, bound_map: BoundMap | None, source: Tensor, labels: Tensor
    ) -> None:
        super().__init__(logit_map, bound_map, source, labels)
        self.sorted = SortedRows(source, labels)
        self.cuts = np.tile(np.array([0, self.sorted.num_classes], np.int32), (self.sorted.num_rows, 1))
        self.top = source.topk(min(TOP, source.shape[1]), dim=1).values

    def rows(self, index: Tensor) -> Self:
        """Look only at some rows, which stay sorted."""
        part = copy.copy(self)
        part.sorted, part.top = self.sorted.rows(index.numpy()), self.top[index]
        part.labels, part.cuts = self.labels[index.numpy()], self.cuts[index.numpy()]
        return part

    def __call__(self, coordinates: Array) -> tuple[float, Array]:
        """Return the mean loss and its gradient."""
        x = torch.tensor(coordinates, dtype=torch.float64, requires_grad=True)
        own, others = self.split(x)
        tempered = isinstance(self.logit_map, RowTemperature)
        inverse = torch.ones(1, 1, dtype=torch.float64)
        if tempered:
            inverse = call(
                self.logit_map, "inverse_temperature", self.logit_map.parameters_from(own), self.top
            )
        inverse = inverse.reshape(-1, 1)
        inputs = [inverse[:, 0].expand(len(self.top)), *self.box(self.top * inverse, others)]
        values = [np.ascontiguousarray(part.detach().numpy()) for part in inputs]
        if tempered:
            losses, *slopes = self._rows(*values).T
        else:
            losses, by_lower, by_upper = (-part for part in self.sorted.log_probability(*values[1:]))
            slopes = [np.zeros(0), by_lower, by_upper]
        return self.finish(x, float(losses.mean()), inputs, slopes)

    def _rows(self, inverse: Array, lower: Array, upper: Array) -> Array:
        """Loss and derivatives of every row (N, 4)."""
        answer = np.empty((len(inverse), 4))
        arrays = (self.sorted.scores, self.sorted.label_scores, inverse, lower, upper, self.cuts, answer)
        over_rows(
            lambda rows: loops.tempered_in_box(*(array[rows] for array in arrays)),
            len(inverse),
            worth=self.sorted.scores.size > SMALL,
        )
        return answer


class Ensemble(RowTemperatureObjective):
    """`ets` over the log of the temperature and three masses."""

    def __init__(
        self, logit_map: LogitMap, bound_map: BoundMap | None, source: Tensor, labels: Tensor
    ) -> None:
        super().__init__(logit_map, bound_map, source, labels)
        self.raw = self._label_probabilities(1.0)[0]

    def rows(self, index: Tensor) -> Self:
        """Look only at some rows."""
        part = super().rows(index)
        part.raw = self.raw[index.numpy()]
        return part

    def __call__(self, coordinates: Array) -> tuple[float, Array]:
        """Return the mean loss and its gradient."""
        inverse, masses = math.exp(-coordinates[0]), coordinates[1:]
        if masses.sum() <= 0.0:
            return math.inf, np.zeros_like(coordinates)
        weights = masses / masses.sum()
        softened, slope = self._label_probabilities(inverse)
        parts = np.column_stack([softened, self.raw, np.full_like(softened, 1.0 / self.sorted.num_classes)])
        mixture = np.maximum(parts @ weights, SMALLEST)
        inner = np.where(mixture > SMALLEST, -1.0 / mixture, 0.0) / len(mixture)
        by_weights = inner @ parts
        by_masses = (by_weights - by_weights @ weights) / masses.sum()
        by_log_temperature = -inverse * weights[0] * (slope @ inner)
        return -float(np.log(mixture).mean()), np.array([by_log_temperature, *by_masses])

    def _label_probabilities(self, inverse: float) -> tuple[Array, Array]:
        """softmax(inverse * scores) at the label (N,), and its derivative in `inverse`."""
        ones = np.ones(len(self.labels))
        losses, slopes, _, _ = self._rows(inverse * ones, 0.0 * ones, ones).T
        probabilities = np.exp(-losses)
        return probabilities, -probabilities * slopes


class DualBounding(JointObjective):
    """`dpb` over its weights and the log of its threshold."""

    def __call__(self, coordinates: Array) -> tuple[float, Array]:
        """Return the mean loss and its gradient."""
        scores, weights = self.source.numpy(), np.ascontiguousarray(coordinates[:-1])
        threshold = math.exp(coordinates[-1])

        def work(rows: slice) -> Array:
            answer = np.zeros(len(coordinates) + 1)
            loops.dual_bounded(scores[rows], self.labels[rows], weights, threshold, answer)
            return answer

        parts = over_rows(work, len(scores), worth=scores.size > SMALL)
        value, *gradient = np.sum(parts, axis=0) / len(scores)
        gradient[-1] *= threshold
        return float(value), np.array(gradient)
