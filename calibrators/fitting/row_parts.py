"""What gives each row of a joint objective its temperature and its box, and the way back for derivatives.

`closed_form_gradients`, `mixtures` and `clipped_logits` are built from these.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.bound_maps.instance_dependent import InstanceDependentBounds
from boxcal.calibrators.fitting.network_pass import NetworkPass, logistic
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.logit_maps.parameterised_temperature import ParameterisedTemperature
from boxcal.calibrators.logit_maps.temperature import RowTemperature

Array = np.ndarray[Any, Any]
Back = Callable[..., Any]
"""From derivatives in what a part of a method gives to those in its coordinates."""


class Temperatures:
    """The inverse temperature of every row: by `pts`, by `ts`, or 1.

    `columns` (T, N) are the ten largest logits of each row less the mean of all. With `pts`, `gaps` (N,)
    holds how far the largest is above the second; otherwise 0.
    """

    def __init__(self, logit_map: LogitMap, columns: Array) -> None:
        self.logit_map, self.count = logit_map, columns.shape[1]
        self.unit, self.inputs, self.gaps = 1.0, columns, np.zeros(self.count)
        if isinstance(logit_map, ParameterisedTemperature):
            self.gaps = columns[0] - columns[1]
            self.unit = 1.0 / float(logit_map.temperature)
            self.inputs = NetworkPass(logit_map.network).read(columns * self.unit)

    def rows(self, index: Array) -> Self:
        """Look only at some rows."""
        part = copy.copy(self)
        part.inputs = np.ascontiguousarray(self.inputs[:, index])
        part.count, part.gaps = part.inputs.shape[1], self.gaps[index]
        return part

    def __call__(self, coordinates: Array) -> tuple[Array, Back]:
        """Give 1 / temperature of every row (N,), and from derivatives in it to those in the coordinates."""
        logit_map, ones = self.logit_map, np.ones(self.count)
        if isinstance(logit_map, ParameterisedTemperature):
            network = NetworkPass(logit_map.network)
            inverse = self.unit * np.exp(-network.forward(coordinates, self.inputs)[0])
            return inverse, lambda by: network.backward(-(by * inverse)[None])[0]
        if isinstance(logit_map, RowTemperature):
            same = math.exp(-coordinates[0])
            return same * ones, lambda by: np.array([-same * by.sum()])
        return ones, lambda by: by[:0]


def boxes(
    bound_map: BoundMap | None,
    coordinates: Array,
    columns: Array,
    num_classes: int,
    inputs: Array | None = None,
) -> tuple[Array, Array, Back]:
    """Give lower and upper of every row, each (N,), and the way back.

    Parameters
    ----------
    bound_map : BoundMap or None
        Without one the box holds every probability.
    coordinates : ndarray
        The bound map's.
    columns : ndarray
        (T, N), the ten largest mapped logits of each row less the mean of all; less any number per row where
        no network reads them so.
    num_classes : int
    inputs : ndarray, optional
        What the network reads of these, if it is known.

    Returns
    -------
    lower, upper : ndarray
    back : callable
        From derivatives in both to those in the coordinates, and in `columns`, None where they are zero.
    """
    count = columns.shape[1]
    if bound_map is None:
        return np.zeros(count), np.ones(count), lambda by_lower, by_upper: (by_lower[:0], None)
    network = None
    if isinstance(bound_map, InstanceDependentBounds):
        network = NetworkPass(bound_map.network)
        read = network.read(columns) if inputs is None else inputs
        outputs = network.forward(coordinates, read)
        (fraction, slack), (rest, range_kept) = logistic(outputs), logistic(-outputs)
    else:
        fraction, slack = np.exp(coordinates)[:, None] * np.ones(count)
        rest, range_kept = 1.0 - fraction, 1.0 - slack
    share = 1.0 - 1.0 / num_classes
    upper = 1.0 / num_classes + share * rest * range_kept

    def back(by_lower: Array, by_upper: Array) -> tuple[Array, Array | None]:
        by_upper = share * np.where(upper <= 1.0, by_upper, 0.0)
        by_outputs = np.stack(
            [fraction * (by_lower / num_classes - by_upper * range_kept), -by_upper * rest * slack]
        )
        if network is None:
            return by_outputs.sum(axis=1), None
        by_coordinates, by_inputs = network.backward(by_outputs * np.stack([rest, range_kept]))
        if inputs is not None:
            return by_coordinates, None
        return by_coordinates, network.read_backward(by_inputs, read)

    return fraction / num_classes, upper.clip(1.0 / num_classes, 1.0), back
