"""What the checks of validation data ask of every row, found in one pass over the logits in blocks of rows.

A block is converted to float64 where the logits are float32, so that no copy of all the logits is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.duplicates import row_groups, row_hashes
from boxcal.calibrators.threads import block_rows, over_blocks

Floats = NDArray[np.float64]


def effective_samples(weights: NDArray[np.float64]) -> float:
    """Return (sum of weights)^2 / (sum of their squares), which is N for equal weights (Kish 1965)."""
    return float(weights.sum() ** 2 / (weights**2).sum())


@dataclass(frozen=True, eq=False)
class RowStatistics:
    """Facts about the rows of logits (N, K), float64 (N,) unless it says otherwise."""

    sums: Floats  # Of the row: its sum, its Euclidean norm, and its smallest and largest logit
    norms: Floats
    smallest: Floats
    largest: Floats
    own: Floats  # The logit of the label
    predicted: NDArray[np.int64]  # int64 (N,), the first class of the largest logit
    at_smallest: NDArray[np.int64]  # int64 (N,), how many logits are equal to the smallest
    hashes: NDArray[np.uint64]  # uint64 (N,), equal for equal rows
    copies: NDArray[np.int64]  # int64 (N,), one number for all copies of a row

    @classmethod
    def of(cls, logits: NDArray[Any], labels: NDArray[np.int64]) -> Self:
        """Look at finite logits (N, K), float32 or float64, and labels (N,)."""

        def work(part: slice) -> tuple[NDArray[Any], ...]:
            rows = logits[part].astype(np.float64)
            smallest = rows.min(axis=1)
            return (
                rows.sum(axis=1),
                np.linalg.norm(rows, axis=1),
                smallest,
                rows.max(axis=1),
                rows[np.arange(len(rows)), labels[part]],
                rows.argmax(axis=1),
                (rows == smallest[:, None]).sum(axis=1),
                row_hashes(rows),
            )

        parts = over_blocks(work, len(logits), block_rows(logits.shape[1]))
        sums, norms, smallest, largest, own, predicted, at_smallest, hashes = (
            np.concatenate(column) for column in zip(*parts, strict=True)
        )
        copies = row_groups(hashes, labels, predicted)
        return cls(sums, norms, smallest, largest, own, predicted, at_smallest, hashes, copies)
