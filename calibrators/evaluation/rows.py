"""Probabilities (N, K) of a classifier, some rows at a time: as they are kept, or computed from the logits.

Metrics read them in blocks, several times. A softmax, or a temperature and constant bounds, are computed anew
each time, so that no float64 array of all the probabilities exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from boxcal.calibrators.calibrator import Calibrator
from boxcal.calibrators.plain_rows import plain_rows

Matrix = NDArray[np.float64]
Indices = NDArray[np.int64]


class Rows(Protocol):
    """Probabilities of the shape (N, K)."""

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        ...

    def at(self, part: slice | Indices) -> Matrix:
        """Return some rows, (n, K) float64."""
        ...


class HeldRows:
    """Probabilities that are kept in an array of any dtype."""

    def __init__(self, array: NDArray[Any]) -> None:
        self.array = array
        self.shape: tuple[int, int] = array.shape

    def at(self, part: slice | Indices) -> Matrix:
        """Return some rows in float64."""
        rows: Matrix = self.array[part].astype(np.float64)
        return rows


class SoftmaxRows:
    """The softmax of logits (N, K), in float64."""

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits
        self.shape = logits.shape[0], logits.shape[1]

    def at(self, part: slice | Indices) -> Matrix:
        """Compute some rows."""
        rows: Matrix = torch.softmax(self._logits[part].double(), dim=1).numpy()
        return rows


class CalibratedRows:
    """The probabilities that a calibrator gives for logits (N, K).

    It must be one temperature and one box, as `is_plain` says: its rows do not depend on each other.
    """

    def __init__(self, calibrator: Calibrator, logits: Tensor) -> None:
        self._calibrator, self._logits = calibrator, logits
        self.shape = logits.shape[0], logits.shape[1]

    def at(self, part: slice | Indices) -> Matrix:
        """Compute some rows."""
        rows: Matrix = self._calibrator(self._logits[part]).numpy()
        return rows


class JoinedRows:
    """Row n is row `place[n]` of `parts[of[n]]`."""

    def __init__(self, parts: Sequence[Rows], of: Indices, place: Indices) -> None:
        self._parts, self._of, self._place = parts, of, place
        self.shape = len(of), parts[0].shape[1]

    def at(self, part: slice | Indices) -> Matrix:
        """Collect some rows."""
        of, place = self._of[part], self._place[part]
        rows = np.empty((len(of), self.shape[1]))
        for number in np.unique(of):
            inside = of == number
            rows[inside] = self._parts[number].at(place[inside])
        return rows


class SomeRows:
    """Some rows of others."""

    def __init__(self, rows: Rows, index: Indices) -> None:
        self._rows, self._index = rows, index
        self.shape = len(index), rows.shape[1]

    def at(self, part: slice | Indices) -> Matrix:
        """Return some of them."""
        return self._rows.at(self._index[part])


def is_plain(calibrator: Calibrator) -> bool:
    """Whether a calibrator is one temperature and one box, and reads logits."""
    logit_map, box = calibrator.logit_map, calibrator.bound_map
    return plain_rows((logit_map.name, logit_map), (box.name, box), calibrator.num_classes) is not None
