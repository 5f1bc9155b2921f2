"""The short way for calibrators that are one temperature and one box: rows straight into the engine's loops.

A handful of rows costs less than the tensor operations around them. `Calibrator.calibrate` goes this way, and
so does the service, where it has arrays and wants arrays: the answers are the same to the last bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from boxcal.calibrators.bound_maps.base import BoundMap
from boxcal.calibrators.bound_maps.constant import ConstantBounds
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.logit_maps.identity import Identity
from boxcal.calibrators.logit_maps.temperature import TemperatureScaling
from boxcal.calibrators.operator.bounds import sum_tolerance
from boxcal.calibrators.operator.checks import raise_for_row

Array = np.ndarray[Any, np.dtype[np.float64]]
NO_SIDE, NO_HELD = np.empty((1, 0), np.int8), np.empty(0, np.bool_)
"""What the loops note beside the probabilities is for gradients."""
INVERSE = np.ones(1)
"""The temperature is the logit map's; the operator's own is 1."""


class PlainRows:
    """`p = BCSoftmax(g / temperature; lower, upper)` of float64 rows.

    Parameters
    ----------
    temperature
        Positive.
    lower, upper
        For every class.
    num_classes
        K.

    Attributes
    ----------
    box
        Lower and upper bound; None where they bound nothing.
    """

    def __init__(self, temperature: float, lower: float, upper: float, num_classes: int) -> None:
        from boxcal.calibrators.operator.cpu_loops import forward_rows  # noqa: PLC0415 - numba loads when needed

        self.box = None if lower <= 0.0 and upper >= 1.0 else (lower, upper)
        self._temperature = temperature
        self._forward = forward_rows
        self._box = np.array([lower]), np.array([upper])
        self._tolerance = sum_tolerance(num_classes)

    def __call__(self, logits: Array) -> tuple[Array, Array]:
        """Give probabilities and mapped logits (N, K) for logits (N, K), which lie row after row.

        Raises
        ------
        ValueError
            Naming the row that has no answer.
        """
        mapped = logits if self._temperature == 1.0 else logits / self._temperature
        probabilities = np.empty_like(mapped)
        low, high = self._box
        refused = self._forward(mapped, low, high, INVERSE, self._tolerance, probabilities, NO_SIDE, NO_HELD)
        if refused >= 0:
            lower, upper = (torch.from_numpy(bound[None]) for bound in self._box)
            raise_for_row(torch.from_numpy(mapped), lower, upper, self._tolerance, refused)
        return probabilities, mapped


def plain_rows(logit_map: LogitMap, bound_map: BoundMap, num_classes: int) -> PlainRows | None:
    """Give the short way through these maps; None where they are more than a temperature and a box."""
    if not isinstance(bound_map, ConstantBounds) or not isinstance(logit_map, Identity | TemperatureScaling):
        return None
    temperature = 1.0 if isinstance(logit_map, Identity) else logit_map.temperature.item()
    return PlainRows(temperature, bound_map.lower.item(), bound_map.upper.item(), num_classes)
