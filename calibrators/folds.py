"""Folds of a validation set; the copies of a row are always in the same fold."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.duplicates import row_groups


def fold_of_each(data: ValidationSet, folds: int, seed: int, *, stratified: bool = True) -> NDArray[np.int64]:
    """Assign every sample (N,) to a fold 0 to `folds` - 1 at random.

    Copies of a row share a fold, so that no fit is judged on a row that it has seen. Stratified folds spread
    each class evenly. They are not for comparing methods: held-out samples then have just the class
    frequencies of the others, which favours methods that fit them by about (K - 1) / N nats.
    """
    rng = np.random.default_rng(seed)
    _, first, group = np.unique(row_groups(data.scores.numpy()), return_index=True, return_inverse=True)
    classes = data.labels.numpy()[first] if stratified else np.zeros(len(first))
    order = np.lexsort((rng.random(len(first)), classes))
    assigned = np.empty(len(first), dtype=np.int64)
    assigned[order] = np.arange(len(first)) % folds
    shared: NDArray[np.int64] = assigned[group]
    return shared
