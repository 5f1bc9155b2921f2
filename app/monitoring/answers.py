"""The answers of a version to kept logits, for the monitor: without request bounds, each row by itself."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from boxcal.app.registry.activator import Activator
from boxcal.calibrators.array_calibrator import ArrayCalibrator

Rows = NDArray[np.float64]

KEPT_ROWS = 4096
"""A row is asked for when it is predicted, when it is labelled, and by each part of the fold."""


class Answers:
    """Gives the probabilities of any version of the registry; blocks.

    The answer to a row is the same to the last bit whatever the other rows are, so that a log may be folded
    in parts of any size. The compiled loops go row by row; a product of matrices may not.

    Parameters
    ----------
    activator
        Loads calibrators.
    """

    def __init__(self, activator: Activator) -> None:
        self._activator = activator
        self._kept: OrderedDict[tuple[int, bytes], Rows] = OrderedDict()

    def __call__(self, version: int, logits: Rows) -> Rows:
        """Return the probabilities (N, K) of a version for logits (N, K)."""
        calibrator = self._activator.load(version).calibrator
        if calibrator.plain is not None:
            return calibrator.plain(np.ascontiguousarray(logits))[0]
        return np.stack([self._row(version, calibrator, row) for row in np.ascontiguousarray(logits)])

    def _row(self, version: int, calibrator: ArrayCalibrator, logits: Rows) -> Rows:
        """Return the probabilities (K,) of one row, from memory if it was asked for before."""
        key = version, logits.tobytes()
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = calibrator(logits[None])[0]
            if len(self._kept) > KEPT_ROWS:
                self._kept.popitem(last=False)
        return found
