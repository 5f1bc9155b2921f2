"""Folds of a validation set; the copies of a row are always in the same fold."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.duplicates import row_groups


def fold_of_each(data: ValidationSet, folds: int, seed: int) -> NDArray[np.int64]:
    """Assign every sample (N,) to a fold 0 to `folds` - 1 at random.

    Copies of a row share a fold, so that no fit is judged on a row that it has seen. Classes are not spread
    evenly: held-out samples would then have just the class frequencies of the others, which favours methods
    that fit class frequencies by about (K - 1) / N nats.
    """
    _, group = np.unique(row_groups(data.scores.numpy()), return_inverse=True)
    rng = np.random.default_rng(seed)
    assigned: NDArray[np.int64] = rng.permutation(np.arange(int(group.max()) + 1) % folds)[group]
    return assigned
