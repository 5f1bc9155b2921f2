"""Folds of a validation set: every class spread evenly, and the copies of a row kept together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.duplicates import row_groups


def fold_of_each(data: ValidationSet, folds: int, seed: int) -> NDArray[np.int64]:
    """Assign every sample (N,) to a fold 0 to `folds` - 1 at random.

    Each class is spread evenly over the folds. Copies of a row share a fold, so that no fit is judged on a
    row that it has seen.
    """
    rng = np.random.default_rng(seed)
    _, first, group = np.unique(row_groups(data.scores.numpy()), return_index=True, return_inverse=True)
    order = np.lexsort((rng.random(len(first)), data.labels.numpy()[first]))
    assigned = np.empty(len(first), dtype=np.int64)
    assigned[order] = np.arange(len(first)) % folds
    shared: NDArray[np.int64] = assigned[group]
    return shared
