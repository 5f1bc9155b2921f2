"""`histogram`: histogram binning of each class against the rest (Zadrozny and Elkan 2001)."""

from __future__ import annotations

import numpy as np

from boxcal.calibrators.logit_maps.per_class import Array, Curve, PerClassFunction

BINS = 15


class HistogramBinning(PerClassFunction):
    """The share of hits in each of 15 bins of equal mass of each class's probability."""

    name = "histogram"
    steps = True

    def curve(self, probabilities: Array, hits: Array) -> Curve:
        """Cut at quantiles; equal probabilities stay together."""
        edges = np.unique(np.quantile(probabilities, np.arange(1, BINS) / BINS))
        where = np.searchsorted(edges, probabilities, side="right")
        counts = np.bincount(where, minlength=len(edges) + 1)
        sums = np.bincount(where, weights=hits, minlength=len(edges) + 1)
        filled = counts > 0
        return np.concatenate([[0.0], edges])[filled], sums[filled] / counts[filled]
