"""Partitions of [0, 1] for binned calibration errors: bins of equal width and of equal mass."""

from __future__ import annotations

from typing import Literal

import numpy as np

from boxcal.calibrators.evaluation.outcomes import Indices, Vector

Binning = Literal["width", "mass"]
NUM_BINS = 15


def bin_edges(
    values: Vector, binning: Binning, bins: int = NUM_BINS, weights: Vector | None = None
) -> Vector:
    """Return the bins + 1 edges of a partition of [0, 1]; bin m is (edge m, edge m+1], the first one closed.

    Parameters
    ----------
    values : float64 (N,)
        Values to bin; equal-width edges do not depend on them.
    binning : "width" or "mass"
        Bins of equal length, or edges at the quantiles m/bins of `values`. Equal values are always in the
        same bin, so bins of equal mass can be unequal or empty.
    weights : float64 (N,), optional
        How much each value counts for the quantiles.
    """
    if bins < 1:
        raise ValueError(f"bins must be at least 1, not {bins}")
    if binning == "width":
        return np.linspace(0.0, 1.0, bins + 1)
    if binning != "mass":
        raise ValueError(f'binning must be "width" or "mass", not {binning!r}')
    if weights is not None:
        order = np.argsort(values, kind="stable")
        reached = np.cumsum(weights[order]) / weights.sum()
        # shares that only rounding tells apart are equal
        ranks = np.searchsorted(reached, np.arange(1, bins) / bins - 1e-12)
        return np.concatenate([[0.0], values[order][np.minimum(ranks, len(values) - 1)], [1.0]])
    ranks = np.ceil(np.arange(1, bins) * len(values) / bins).astype(int) - 1
    inner = np.sort(values)[np.maximum(ranks, 0)]
    return np.concatenate([[0.0], inner, [1.0]])


def bin_indices(values: Vector, edges: Vector) -> Indices:
    """Return the bin of each value, 0 to len(edges) - 2; 0 is in the first bin and 1 in the last."""
    return np.searchsorted(edges[1:-1], values, side="left").astype(np.int64)
