"""Folds of a validation set; the copies of a row, and the rows of a group, are always in the same fold."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.data import ValidationSet

FOLDS = 5
"""Of the cross-validations of a fit."""


def fold_masks(data: ValidationSet, folds: int, seed: int) -> list[Tensor]:
    """Assign the samples to folds at random, and give a mask (N,) of each.

    Copies of a row, and rows of a group, share a fold, so that no fit is judged on a row that it has seen;
    where fewer than `folds` rows or groups differ, there are fewer folds. Classes are not spread evenly:
    held-out samples would then have just the class frequencies of the others, which favours methods that fit
    class frequencies by about (K - 1) / N nats.
    """
    group = np.arange(len(data)) if data.units is None else data.units.numpy()
    rng = np.random.default_rng(seed)
    fold_of = torch.from_numpy(rng.permutation(np.arange(int(group.max()) + 1) % folds)[group])
    masks = [fold_of == fold for fold in range(folds)]
    return [mask for mask in masks if mask.any() and not mask.all()]
