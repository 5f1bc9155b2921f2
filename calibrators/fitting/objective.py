"""The objective of fits: loss after box-constrained softmax after maps, and its gradient.

With T the logit map and (a, b) the bound map at some coordinates, the mean over the rows of
`-log BCSoftmax(T(g); a, b)_y`, plus the map's penalty. Derivatives go back through the operator, the bound
map and the logit map. Rows are worked on in blocks that fit into the processor's cache.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Self

import numpy as np

from boxcal.calibrators.array_ops import top_columns, top_columns_back
from boxcal.calibrators.fitting.rows import FitRows, dense_loss, mean_of
from boxcal.calibrators.maps.base import BoxMap, LogitMap
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.maps.parameters import Array, Gradients, Limits, Vjp
from boxcal.calibrators.threads import SMALL, blocks, over_rows


class Objective:
    """Mean loss of `BCSoftmax(T(g); a, b)` over some rows, with its penalty and its gradient.

    The logit map's coordinates come first, then the bound map's, if there is one. Where the logit map only
    divides rows by temperatures, the loss of rows that are sorted once is used (`FitRows.tempered`).
    """

    pseudo_sample = False

    def __init__(self, logit_map: LogitMap, bound_map: BoxMap | None, data: FitRows) -> None:
        self.logit_map, self.bound_map, self.data = logit_map, bound_map, data
        self.tempering = logit_map.tempering or IdentityMap(logit_map.num_classes)
        self.is_tempered = logit_map.tempering is logit_map
        self.is_of_labels = logit_map.mixes_labels and bound_map is None
        self.precomputed: Array | None = None
        if self.is_of_labels:
            self.precomputed = np.exp(-self._at_temperature(1.0)[0])
        elif not self.is_tempered:
            self.precomputed = logit_map.precompute(data.scores)
        self._read()

    def _read(self) -> None:
        """Compute what the networks of the maps read, where this does not depend on the coordinates."""
        self.reading, self.box_reading = np.empty((0, 0)), np.empty((0, 0))
        self.tempering = self.logit_map.tempering or self.tempering
        if self.is_tempered or self.tempering.is_network:
            self.reading = self.tempering.reading(self.data.columns)
        if self.is_tempered and not self.logit_map.size and self.bound_map is not None:
            self.box_reading = self.bound_map.reading(self.data.columns)

    @property
    def limits(self) -> Limits:
        """Limits of every coordinate."""
        return [*self.logit_map.limits(), *(self.bound_map.limits() if self.bound_map else [])]

    @property
    def is_network(self) -> bool:
        """Whether a network is among the maps."""
        return self.logit_map.is_network or (self.bound_map is not None and self.bound_map.is_network)

    def rows(self, index: Array) -> Self:
        """Keep some rows, given as indices or as a mask."""
        part = copy.copy(self)
        part.data = self.data.rows(index)
        part.precomputed = None if self.precomputed is None else self.precomputed[index]
        part.reading, part.box_reading = (
            np.ascontiguousarray(read[:, index]) if read.size else read
            for read in (self.reading, self.box_reading)
        )
        return part

    def with_maps(self, logit_map: LogitMap, bound_map: BoxMap | None) -> Self:
        """Give the objective of two maps of the same kinds, which differ in what their networks read."""
        other = copy.copy(self)
        other.logit_map, other.bound_map = logit_map, bound_map
        other._read()
        return other

    def with_pseudo_sample(self) -> Self:
        """Count one sample more than there are, where a network gives the temperatures.

        It is any row with the same probability, and its label is the class with the second largest logit.
        Where no sample that a network is certain of is wrong, their loss alone is lowest with an infinitely
        small temperature. Platt (1999) keeps the targets of his sigmoid from 0 and 1 for the same reason.
        """
        other = copy.copy(self)
        other.pseudo_sample = self.tempering.is_network
        return other

    def between(self, plain: Array, point: Array, share: float) -> Array:
        """Give coordinates at which networks answer what is between a constant answer and their own.

        `share`: 0 for the constants at `plain`, 1 for the answers at `point`.
        """
        size = self.logit_map.size
        fixed = self.logit_map.fixed_between(plain[:size])
        if self.bound_map is not None:
            fixed = np.concatenate([fixed, self.bound_map.fixed_between(plain[size:])])
        return np.where(fixed, point, share * point + (1.0 - share) * plain)

    def value(self, coordinates: Array) -> float:
        return self(coordinates)[0]

    def mean_nll(self, coordinates: Array) -> float:
        """Return the mean loss without the penalty."""
        penalty = self.logit_map.penalty(self.logit_map.at(coordinates[: self.logit_map.size]))
        return self.value(coordinates) - (penalty[0] if penalty else 0.0)

    def __call__(self, coordinates: Array) -> tuple[float, Array]:
        """Return the objective and its gradient; infinity and zeros where the loss is not finite."""
        size = self.logit_map.size
        own, others = coordinates[:size], coordinates[size:]
        with np.errstate(all="ignore"):
            if self.is_of_labels:
                value, gradients, by_box = self._of_labels(own)
            else:
                value, gradients, by_box = (self._tempered if self.is_tempered else self._dense)(own, others)
            penalty = self.logit_map.penalty(self.logit_map.at(own))
            if penalty is not None:
                value += penalty[0]
                gradients = {name: gradients[name] + penalty[1][name] for name in penalty[1]}
            slopes = [self.logit_map.slopes(own, gradients)]
            if self.bound_map is not None:
                slopes.append(self.bound_map.slopes(others, by_box))
            gradient = np.concatenate(slopes)
        # A bound with an infinite reciprocal: the descent takes a shorter step.
        if not (math.isfinite(value) and np.isfinite(gradient).all()):
            return math.inf, np.zeros_like(coordinates)
        return value, gradient

    def _tempered(self, own: Array, others: Array) -> tuple[float, Gradients, Gradients]:
        """Evaluate a map that divides rows by temperatures: d loss / d(1 / T) is all that goes back to it."""
        data, count, tempering = self.data, len(self.data), self.tempering
        inverse, inverse_back = tempering.inverse(tempering.at(own), self.reading)
        if not np.isfinite(inverse).all():
            return _undefined(self.logit_map, self.bound_map)
        is_read = self.bound_map is not None and self.bound_map.is_network and not self.box_reading.size
        columns = data.columns * inverse if is_read else data.columns
        lower, upper, box_back = self._bounds(others, columns)
        losses, by_inverse, by_lower, by_upper = data.tempered.losses(inverse, lower, upper)
        if data.weights is not None:
            losses, by_inverse, by_lower, by_upper = (
                part * data.weights for part in (losses, by_inverse, by_lower, by_upper)
            )
        if self.pseudo_sample:
            cost = (data.columns[0] - data.columns[1]) / count
            losses, by_inverse = losses + cost * inverse, by_inverse + cost
        by_box, by_reading = box_back(by_lower / count, by_upper / count)
        by_inverse = by_inverse / count
        if is_read and by_reading is not None and self.bound_map is not None:
            by_inverse += (self.bound_map.reading_back(columns, by_reading) * data.columns).sum(axis=0)
        return float(losses.mean()), inverse_back(by_inverse)[0], by_box

    def _at_temperature(self, temperature: Any) -> tuple[Array, Array]:
        """Give the loss of every row at one temperature (N,), and its derivatives in 1 / temperature."""
        ones = np.ones(len(self.data))
        losses, by_inverse, _, _ = self.data.tempered.losses(ones / temperature, 0.0 * ones, ones)
        return losses, by_inverse

    def _of_labels(self, own: Array) -> tuple[float, Gradients, Gradients]:
        """Evaluate a map by the probabilities of the labels, at its temperature and unchanged."""
        mixed: Any = self.logit_map
        p, weights = mixed.at(own), self.data.weights
        softened, by_inverse = self._at_temperature(p["temperature"])
        losses, back = mixed.of_labels(p, np.exp(-softened), by_inverse, self.precomputed)
        by_losses = (np.ones(len(losses)) if weights is None else weights) / len(losses)
        return mean_of(losses, weights), back(by_losses), {}

    def _dense(self, own: Array, others: Array) -> tuple[float, Gradients, Gradients]:
        """Evaluate any map, in blocks of rows."""
        data, count = self.data, len(self.data)
        p = self.logit_map.at(own)

        def work(rows: slice) -> list[tuple[float, Gradients, Gradients]]:
            parts = blocks(rows, self.logit_map.num_classes) if data.scores.ndim == 2 else [rows]
            return [self._block(p, others, part) for part in parts]

        worth = data.scores.size > SMALL and self.logit_map.reads != "inputs"
        each = [one for parts in over_rows(work, count, worth=worth) for one in parts]
        value = sum(loss for loss, _, _ in each) / count
        by_map, by_box = (
            {name: np.sum([part[name] for part in parts], axis=0) / count for name in parts[0]}
            for parts in ([one[1] for one in each], [one[2] for one in each])
        )
        if self.pseudo_sample:
            extra, added = self._pseudo_loss(own)
            value += extra
            by_map |= {name: by_map[name] + slope for name, slope in added.items()}
        return value, by_map, by_box

    def _block(self, p: Any, others: Array, rows: slice) -> tuple[float, Gradients, Gradients]:
        """Sum the losses of a block of rows, and their derivatives in the parameters of both maps."""
        precomputed = None if self.precomputed is None else self.precomputed[rows]
        mapped, back = self.logit_map.vjp(p, self.data.scores[rows], precomputed)
        if not np.isfinite(mapped).all():
            value, by_map, by_box = _undefined(self.logit_map, self.bound_map)
            return value, by_map, by_box
        mapped = np.ascontiguousarray(mapped)
        is_read = self.bound_map is not None and self.bound_map.is_network
        columns, order = top_columns(mapped) if is_read else (mapped[:, :1].T, np.empty(0))
        lower, upper, box_back = self._bounds(others, columns)
        losses, by_mapped, by_lower, by_upper = dense_loss(mapped, self.data.labels[rows], lower, upper)
        if self.data.weights is not None:
            weights = self.data.weights[rows]
            losses, by_lower, by_upper = losses * weights, by_lower * weights, by_upper * weights
            by_mapped *= weights[:, None]
        by_box, by_reading = box_back(by_lower, by_upper)
        if self.bound_map is not None and by_reading is not None:
            by_mapped += top_columns_back(self.bound_map.reading_back(columns, by_reading), order, mapped)
        return float(losses.sum()), back(by_mapped, False)[0], by_box

    def _bounds(self, others: Array, columns: Array) -> tuple[Array, Array, Vjp]:
        """Give lower and upper of every row, each (N,), and the way back; 0 and 1 without a bound map."""
        if self.bound_map is None:
            ones = np.ones(columns.shape[1])
            return 0.0 * ones, ones, lambda by_lower, by_upper: ({}, None)
        reading = self.box_reading if self.box_reading.size else self.bound_map.reading(columns)
        return self.bound_map.bounds(self.bound_map.at(others), reading)

    def _pseudo_loss(self, own: Array) -> tuple[float, Gradients]:
        """Give the loss of the pseudo-sample, and its derivatives, of a network that another map follows."""
        tempering = self.tempering
        gaps = (self.data.columns[0] - self.data.columns[1]) / len(self.data) ** 2
        inverse, back = tempering.inverse(tempering.at(own[: tempering.size]), self.reading)
        return float(gaps @ inverse), {f"first.{name}": slope for name, slope in back(gaps)[0].items()}


def _undefined(logit_map: LogitMap, bound_map: BoxMap | None) -> tuple[float, Gradients, Gradients]:
    """Give an infinite loss without derivatives."""
    by_map, by_box = (
        {} if one is None else {name: np.zeros_like(value) for name, value in one.parameters.items()}
        for one in (logit_map, bound_map)
    )
    return math.inf, by_map, by_box


def objective_of(
    logit_map: LogitMap,
    bound_map: BoxMap | None,
    scores: Array,
    labels: Array,
    weights: Array | None = None,
) -> Objective:
    """Give the objective of two maps on some rows; see `FitRows`."""
    return Objective(logit_map, bound_map, FitRows(scores, labels, weights))
