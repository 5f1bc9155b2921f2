"""Closed-form derivatives of `ts`, `pts`, `ets`, `dpb` and `pb-mlp`: autograd takes 2 to 7 times as long.

They give what `JointObjective` gives at the same coordinates.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.fitting import loops
from boxcal.calibrators.fitting.clipped_logits import ClippedLogits
from boxcal.calibrators.fitting.joint import JointObjective, mean_of
from boxcal.calibrators.fitting.linear_in_box import LinearInBox
from boxcal.calibrators.fitting.mixtures import ClippedMixture, MixtureInBox
from boxcal.calibrators.fitting.network_pass import Back
from boxcal.calibrators.fitting.row_parts import Boxes, Temperatures
from boxcal.calibrators.fitting.tempered_rows import TemperedRows
from boxcal.calibrators.formulas import TOP
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.logit_maps.chain import Chain
from boxcal.calibrators.logit_maps.dual_bounding import DualProbabilityBounding
from boxcal.calibrators.logit_maps.ensemble_temperature import SMALLEST, EnsembleTemperatureScaling
from boxcal.calibrators.logit_maps.identity import Identity
from boxcal.calibrators.logit_maps.linear import LinearMap
from boxcal.calibrators.logit_maps.logit_bounding import LogitBounding
from boxcal.calibrators.logit_maps.temperature import RowTemperature
from boxcal.calibrators.operator.uniform import SortedRows
from boxcal.calibrators.threads import SMALL, over_rows

Array = np.ndarray[Any, Any]
LARGEST_IN_FLOAT32 = 1000.0
"""Larger logits are not computed with in float32, which has seven digits."""


def objective_of(
    logit_map: LogitMap,
    bound_map: BoundMap | None,
    source: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    sort: Callable[[], SortedRows] | None = None,
) -> JointObjective:
    """Give the objective of a fit: in closed form where the maps have one, else by autograd."""
    kind: type[JointObjective] = JointObjective
    if isinstance(logit_map, Chain) and isinstance(logit_map.second, LogitBounding):
        if isinstance(logit_map.first, Identity | RowTemperature):
            return ClippedLogits(logit_map, source, labels, weights)
        if isinstance(logit_map.first, EnsembleTemperatureScaling):
            kind = ClippedMixture
    elif bound_map is not None and isinstance(logit_map, EnsembleTemperatureScaling):
        kind = MixtureInBox
    elif isinstance(logit_map, Identity | RowTemperature):
        kind = RowTemperatureObjective
    elif isinstance(logit_map, EnsembleTemperatureScaling):
        kind = Ensemble
    elif bound_map is not None and isinstance(logit_map, LinearMap):
        kind = LinearInBox
    elif bound_map is None and isinstance(logit_map, DualProbabilityBounding):
        kind = DualBounding
    return kind(logit_map, bound_map, source, labels, weights, sort=sort)


class RowTemperatureObjective(JointObjective):
    """`ts`, `pts` or the identity, alone or under bounds, constant or those of a network."""

    precision: type[np.floating[Any]] = np.float64
    """Of the networks."""

    def _prepare(self) -> None:
        rows, is_scaled = self._sort(), not isinstance(self.logit_map, Identity)
        self.sorted: SortedRows | TemperedRows = TemperedRows(rows) if is_scaled else rows
        top = self.source.topk(min(TOP, self.source.shape[1]), dim=1).values
        self.columns = np.ascontiguousarray((top - self.source.mean(dim=1, keepdim=True)).numpy().T)

    def _read(self) -> None:
        self.temperatures = Temperatures(self.logit_map, self.columns, self.precision)
        fixed = self.columns if isinstance(self.logit_map, Identity) else None
        self.boxes = Boxes(self.bound_map, self.source.shape[1], fixed, self.precision)

    def rows(self, index: Tensor) -> Self:
        """Look only at some rows, which stay sorted."""
        part = self.shallow(index)
        part.sorted = self.sorted.rows(index.numpy())
        part.columns = np.ascontiguousarray(self.columns[:, index.numpy()])
        part.temperatures = self.temperatures.rows(index.numpy())
        part.boxes = self.boxes.rows(index.numpy())
        return part

    def rough(self) -> Self:
        """Shorten rows; compute losses and networks in float32 where temperatures change the losses."""
        part = copy.copy(self)
        part.sorted = self.sorted.rough()
        if isinstance(self.sorted, TemperedRows):
            part.precision = np.float32
            part._read()
        return part

    def value(self, coordinates: Array) -> float:
        """Return the mean loss."""
        return float(self._evaluated(coordinates)[0][0].mean())

    def __call__(self, coordinates: Array) -> tuple[float, Array]:
        """Return the mean loss and its gradient."""
        (losses, by_inverse, by_lower, by_upper), to_temperature, to_box = self._evaluated(coordinates)
        value = float(losses.mean())
        if not math.isfinite(value):
            return math.inf, np.zeros_like(coordinates)
        with np.errstate(over="ignore", invalid="ignore"):
            by_box, by_columns = to_box(by_lower, by_upper)
            if by_columns is not None:
                by_inverse = by_inverse + (by_columns * self.columns).sum(axis=0)
            gradient = np.concatenate([to_temperature(by_inverse), by_box]) / len(losses)
        # A bound with an infinite reciprocal: the descent takes a shorter step.
        return (value, gradient) if np.isfinite(gradient).all() else (math.inf, np.zeros_like(coordinates))

    def _evaluated(self, coordinates: Array) -> tuple[list[Array], Back, Back]:
        """Give every row's loss and its derivatives in 1 / temperature and the bounds, and the ways back."""
        size = self.logit_map.size
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            inverse, to_temperature = self.temperatures(coordinates[:size])
            reads = self.boxes.network is not None and size
            columns = self.columns * inverse if reads else self.columns
            lower, upper, to_box = self.boxes(coordinates[size:], columns)
            if not np.isfinite(inverse).all():
                return [np.full(len(self.labels), math.inf)] * 4, to_temperature, to_box
            parts = self._losses(inverse, lower, upper)
            if self.weights is not None:
                parts = [part * self.weights for part in parts]
            if self.pseudo_sample:
                cost = self.temperatures.gaps / len(self.labels)
                parts[:2] = [parts[0] + cost * inverse, parts[1] + cost]
            return parts, to_temperature, to_box

    def _losses(self, inverse: Array, lower: Array, upper: Array) -> list[Array]:
        """Loss of every row, and its derivatives in 1 / temperature and in both bounds, each (N,)."""
        if isinstance(self.sorted, TemperedRows):
            return self.sorted.losses(inverse, lower, upper)
        losses, by_lower, by_upper = (-part for part in self.sorted.log_probability(lower, upper))
        return [losses, np.zeros_like(losses), by_lower, by_upper]


class Ensemble(RowTemperatureObjective):
    """`ets` over the log of the temperature and three masses."""

    def _prepare(self) -> None:
        super()._prepare()
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
        parts = np.column_stack([softened, self.raw, np.full_like(softened, 1.0 / self.source.shape[1])])
        mixture = np.maximum(parts @ weights, SMALLEST)
        inner = np.where(mixture > SMALLEST, -1.0 / mixture, 0.0) / len(mixture)
        if self.weights is not None:
            inner = inner * self.weights
        by_weights = inner @ parts
        by_masses = (by_weights - by_weights @ weights) / masses.sum()
        by_log_temperature = -inverse * weights[0] * (slope @ inner)
        return -mean_of(np.log(mixture), self.weights), np.array([by_log_temperature, *by_masses])

    def _label_probabilities(self, inverse: float) -> tuple[Array, Array]:
        """softmax(inverse * scores) at the label (N,), and its derivative in `inverse`."""
        ones = np.ones(len(self.labels))
        losses, slopes, _, _ = self._losses(inverse * ones, 0.0 * ones, ones)
        probabilities = np.exp(-losses)
        return probabilities, -probabilities * slopes


class DualBounding(JointObjective):
    """`dpb` over its weights and the log of its threshold."""

    def _prepare(self) -> None:
        halved = self.source.float()
        # Half the memory to read in every evaluation, where no digit is lost.
        if torch.equal(halved.double(), self.source):
            self.source = halved
        self.precision: type[np.floating[Any]] = np.float64

    def rough(self) -> Self:
        """Compute in float32, which takes half the time, unless the logits are too large for it."""
        part = copy.copy(self)
        if float(self.source.abs().max()) <= LARGEST_IN_FLOAT32:
            part.source, part.precision = self.source.float(), np.float32
        return part

    def __call__(self, coordinates: Array) -> tuple[float, Array]:
        """Return the mean loss and its gradient."""
        scores, weights = self.source.numpy(), coordinates[:-1].astype(self.precision)
        counts = np.ones(len(scores)) if self.weights is None else self.weights
        threshold = self.precision(math.exp(coordinates[-1]))

        def work(rows: slice) -> Array:
            answer = np.zeros(len(coordinates) + 1)
            loops.dual_bounded(scores[rows], self.labels[rows], counts[rows], weights, threshold, answer)
            return answer

        parts = over_rows(work, len(scores), worth=scores.size > SMALL)
        value, *gradient = np.sum(parts, axis=0) / len(scores)
        gradient[-1] *= threshold
        return float(value), np.array(gradient)
