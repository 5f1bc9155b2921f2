"""Calibrated rows by one call of the engine: for calibrators that are one temperature and one box.

A handful of rows costs less than the tensor operations around them, so the service goes this way.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from calibrators.bound_maps.constant import ConstantBounds
from calibrators.calibrator import Calibrator
from calibrators.logit_maps.identity import Identity
from calibrators.logit_maps.temperature import TemperatureScaling
from calibrators.operator.bounds import sum_tolerance
from calibrators.operator.checks import raise_for_row

Array = np.ndarray[Any, np.dtype[np.float64]]
NO_SIDE, NO_HELD = np.empty((1, 0), np.int8), np.empty(0, np.bool_)
"""What the loops note beside the probabilities is for gradients."""


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
        from calibrators.operator.cpu_loops import forward_rows  # noqa: PLC0415 - numba loads when needed

        self.box = None if lower <= 0.0 and upper >= 1.0 else (lower, upper)
        self._forward = forward_rows
        self._box = np.array([lower]), np.array([upper])
        self._inverse = np.array([1.0 / temperature])
        self._tolerance = sum_tolerance(num_classes)

    def __call__(self, logits: Array) -> Array:
        """Give probabilities (N, K) for finite logits (N, K), which lie row after row.

        Raises
        ------
        ValueError
            Naming the row that has no answer.
        """
        probabilities = np.empty_like(logits)
        low, high = self._box
        refused = self._forward(
            logits, low, high, self._inverse, self._tolerance, probabilities, NO_SIDE, NO_HELD
        )
        if refused >= 0:
            lower, upper = (torch.from_numpy(bound[None]) for bound in self._box)
            raise_for_row(torch.from_numpy(logits), lower, upper, self._tolerance, refused)
        return probabilities


@lru_cache(maxsize=16)
def plain_rows(calibrator: Calibrator) -> PlainRows | None:
    """Give the short way through a calibrator; None for one that is more than a temperature and a box."""
    scale, box = calibrator.logit_map, calibrator.bound_map
    if not isinstance(box, ConstantBounds) or not isinstance(scale, Identity | TemperatureScaling):
        return None
    temperature = 1.0 if isinstance(scale, Identity) else scale.temperature.item()
    return PlainRows(temperature, box.lower.item(), box.upper.item(), calibrator.num_classes)
