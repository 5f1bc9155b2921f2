"""Probabilities (N, K) of a classifier, some rows at a time: as they are kept, or computed from the logits.

Metrics read them in blocks, several times. A softmax, or a temperature and constant bounds, are computed anew
each time, so that no float64 array of all the probabilities exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.array_ops import softmax

Matrix = NDArray[np.float64]
Indices = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ProbabilityRows:
    """Probabilities of the shape (N, K); `at(part)` returns some rows, (n, K) float64."""

    shape: tuple[int, int]
    at: Callable[[slice | Indices], Matrix]


def kept_rows(array: NDArray[Any]) -> ProbabilityRows:
    """Take probabilities that are kept in an array (N, K) of any dtype."""
    return ProbabilityRows(array.shape, lambda part: array[part].astype(np.float64))


def softmax_rows(logits: NDArray[Any]) -> ProbabilityRows:
    """Compute the softmax of logits (N, K), in float64."""
    shape = logits.shape[0], logits.shape[1]
    return ProbabilityRows(shape, lambda part: softmax(logits[part].astype(np.float64)))


def calibrated_rows(calibrator: ArrayCalibrator, logits: NDArray[Any]) -> ProbabilityRows:
    """Compute what a calibrator gives for logits (N, K); `is_plain`, so no row depends on the others."""
    shape = logits.shape[0], logits.shape[1]
    return ProbabilityRows(shape, lambda part: calibrator(logits[part]))


def joined_rows(parts: Sequence[ProbabilityRows], of: Indices, place: Indices) -> ProbabilityRows:
    """Let row n be row `place[n]` of `parts[of[n]]`."""
    num_classes = parts[0].shape[1]

    def at(part: slice | Indices) -> Matrix:
        sources, places = of[part], place[part]
        rows = np.empty((len(sources), num_classes))
        for number in np.unique(sources):
            inside = sources == number
            rows[inside] = parts[number].at(places[inside])
        return rows

    return ProbabilityRows((len(of), num_classes), at)


def some_rows(rows: ProbabilityRows, index: Indices) -> ProbabilityRows:
    """Take some rows of others."""
    return ProbabilityRows((len(index), rows.shape[1]), lambda part: rows.at(index[part]))


def is_plain(calibrator: ArrayCalibrator) -> bool:
    """Whether a calibrator is one temperature and one box, and reads logits."""
    return calibrator.plain is not None
