"""What gives each row of a joint objective its temperature and its box, and the way back for derivatives.

`closed_form_gradients`, `mixtures` and `clipped_logits` are built from these.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Self

import numpy as np

from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.bound_maps.instance_dependent import InstanceDependentBounds
from boxcal.calibrators.fitting.network_pass import Back, NetworkPass, logistic
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.logit_maps.parameterised_temperature import ParameterisedTemperature
from boxcal.calibrators.logit_maps.temperature import RowTemperature

Array = np.ndarray[Any, Any]
Precision = type[np.floating[Any]]


class Temperatures:
    """The inverse temperature of every row: by `pts`, by `ts`, or 1.

    `columns` (T, N) are the ten largest logits of each row less the mean of all. With `pts`, `gaps` (N,)
    holds how far the largest is above the second; otherwise 0. `precision` is that of the network.
    """

    def __init__(self, logit_map: LogitMap, columns: Array, precision: Precision = np.float64) -> None:
        self.logit_map, self.count = logit_map, columns.shape[1]
        self.unit, self.inputs, self.gaps = 1.0, columns, np.zeros(self.count)
        self.network: NetworkPass | None = None
        if isinstance(logit_map, ParameterisedTemperature):
            self.gaps = columns[0] - columns[1]
            self.unit = 1.0 / float(logit_map.temperature)
            self.network = NetworkPass(logit_map.network, precision)
            self.inputs = self.network.read(columns * self.unit)

    def rows(self, index: Array) -> Self:
        """Look only at some rows."""
        part = copy.copy(self)
        part.inputs = np.ascontiguousarray(self.inputs[:, index])
        part.count, part.gaps = part.inputs.shape[1], self.gaps[index]
        return part

    def __call__(self, coordinates: Array) -> tuple[Array, Back]:
        """Give 1 / temperature of every row (N,), and from derivatives in it to those in the coordinates."""
        ones = np.ones(self.count)
        if self.network:
            outputs, back = self.network.forward(coordinates, self.inputs)
            inverse = self.unit * np.exp(-outputs[0])
            return inverse, lambda by: back(-(by * inverse)[None])[0]
        if isinstance(self.logit_map, RowTemperature):
            same = math.exp(-coordinates[0])
            return same * ones, lambda by: np.array([-same * by.sum()])
        return ones, lambda by: by[:0]


class Boxes:
    """The bounds of every row: those of a network, constant ones, or 0 and 1 without a bound map.

    Parameters
    ----------
    bound_map : BoundMap or None
    num_classes : int
    columns : ndarray, optional
        (T, N): the ten largest mapped logits of each row less the mean of all, if they are always the same.
    precision : numpy floating type
        Of the network.
    """

    def __init__(
        self,
        bound_map: BoundMap | None,
        num_classes: int,
        columns: Array | None = None,
        precision: Precision = np.float64,
    ) -> None:
        self.is_open, self.num_classes = bound_map is None, num_classes
        self.network: NetworkPass | None = None
        self.inputs: Array | None = None
        if isinstance(bound_map, InstanceDependentBounds):
            self.network = NetworkPass(bound_map.network, precision)
            self.inputs = None if columns is None else self.network.read(columns)

    def rows(self, index: Array) -> Self:
        """Look only at some rows."""
        part = copy.copy(self)
        if self.inputs is not None:
            part.inputs = np.ascontiguousarray(self.inputs[:, index])
        return part

    def __call__(self, coordinates: Array, columns: Array) -> tuple[Array, Array, Back]:
        """Give lower and upper of every row, each (N,), and the way back.

        Parameters
        ----------
        coordinates : ndarray
            The bound map's.
        columns : ndarray
            (T, N), the ten largest mapped logits of each row less the mean of all; only N matters where no
            network reads them, or where they were given before.

        Returns
        -------
        lower, upper : ndarray
        back : callable
            From derivatives in both to those in the coordinates, and in `columns`, None where they are zero.
        """
        count = columns.shape[1]
        if self.is_open:
            return np.zeros(count), np.ones(count), lambda by_lower, by_upper: (by_lower[:0], None)
        network, classes = self.network, self.num_classes
        if network:
            read = network.read(columns) if self.inputs is None else self.inputs
            outputs, network_back = network.forward(coordinates, read)
            (fraction, slack), (rest, range_kept) = logistic(outputs), logistic(-outputs)
        else:
            fraction, slack = np.exp(coordinates)[:, None] * np.ones(count)
            rest, range_kept = 1.0 - fraction, 1.0 - slack
        share = 1.0 - 1.0 / classes
        upper = 1.0 / classes + share * rest * range_kept

        def back(by_lower: Array, by_upper: Array) -> tuple[Array, Array | None]:
            by_upper = share * np.where(upper <= 1.0, by_upper, 0.0)
            by_outputs = np.stack(
                [fraction * (by_lower / classes - by_upper * range_kept), -by_upper * rest * slack]
            )
            if network is None:
                return by_outputs.sum(axis=1), None
            by_coordinates, by_inputs = network_back(by_outputs * np.stack([rest, range_kept]))
            if self.inputs is not None:
                return by_coordinates, None
            return by_coordinates, network.read_backward(by_inputs, read)

        return fraction / classes, upper.clip(1.0 / classes, 1.0), back
