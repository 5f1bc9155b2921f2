"""The objective of `vector`, `sms`, `matrix` and `dirichlet` in a box, in closed form: `+pb` and `+pb-mlp`.

Rows that no bound holds, which are most, are a softmax.
"""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from torch import Tensor

from boxcal.calibrators.fitting.joint import JointObjective, dense_loss, mean_of
from boxcal.calibrators.fitting.kernels import largest_of_columns
from boxcal.calibrators.fitting.linear_loss import LinearPart
from boxcal.calibrators.fitting.row_parts import Boxes
from boxcal.calibrators.formulas import TOP
from boxcal.calibrators.logit_maps.linear import LinearMap

Array = np.ndarray[Any, Any]


class LinearInBox(JointObjective):
    """A linear map with its penalty, and constant bounds or those of a network."""

    logit_map: LinearMap

    def _prepare(self) -> None:
        self.read = self.logit_map.columns(self.source)
        self.part = LinearPart(tuple(next(self.logit_map.parameters()).shape), self.logit_map.penalty_factors)

    def _read(self) -> None:
        self.boxes = Boxes(self.bound_map, self.logit_map.num_classes)

    def rows(self, index: Tensor) -> Self:
        """Look only at some rows."""
        part = self.shallow(index)
        part.read = np.ascontiguousarray(self.read[:, index.numpy()])
        return part

    def __call__(self, coordinates: Array) -> tuple[float, Array]:
        """Return the mean loss with its penalty, and the gradient."""
        size, count = self.logit_map.size, len(self.labels)
        weight, offsets = self.part.split(coordinates[:size])
        with np.errstate(over="ignore", invalid="ignore"):
            mapped = self.part.mapped(weight, offsets, self.read)
        if not np.isfinite(mapped).all():
            return math.inf, np.zeros_like(coordinates)
        mapped -= mapped.max(axis=0)
        columns, order = mapped[:1], None
        if self.bound_map is not None and self.bound_map.is_network:
            columns = np.empty((min(TOP, len(mapped)), count))
            order = np.empty(columns.shape, np.int64)
            largest_of_columns(mapped, columns, order)
            columns -= mapped.mean(axis=0)
        lower, upper, to_box = self.boxes(coordinates[size:], columns)
        losses, slopes, by_lower, by_upper = self._losses(mapped, lower, upper)
        if self.weights is not None:
            slopes, by_lower, by_upper = (part * self.weights for part in (slopes, by_lower, by_upper))
        by_box, by_columns = to_box(by_lower, by_upper)
        if by_columns is not None and order is not None:
            slopes[order, np.arange(count)] += by_columns
            slopes -= by_columns.sum(axis=0) / len(slopes)
        by_weight, by_offsets = (part / count for part in self.part.backward(slopes, self.read))
        value, gradient = self.part.penalised(
            coordinates[:size], mean_of(losses, self.weights), by_weight, by_offsets
        )
        return value, np.concatenate([gradient, by_box / count])

    def _losses(self, mapped: Array, lower: Array, upper: Array) -> tuple[Array, Array, Array, Array]:
        """Loss of every row (N,), and its derivatives in the mapped logits (K, N) and in both bounds."""
        every = np.arange(mapped.shape[1])
        slopes = np.exp(mapped)
        total = slopes.sum(axis=0)
        held = np.flatnonzero((slopes.min(axis=0) < lower * total) | (upper * total < 1.0))
        losses = np.log(total) - mapped[self.labels, every]
        slopes /= total
        slopes[self.labels, every] -= 1.0
        by_lower, by_upper = np.zeros((2, len(every)))
        if len(held):
            scores = np.ascontiguousarray(mapped[:, held].T)
            answers = dense_loss(scores, self.labels[held], lower[held], upper[held])
            losses[held], slopes[:, held], by_lower[held], by_upper[held] = (part.T for part in answers)
        return losses, slopes, by_lower, by_upper
