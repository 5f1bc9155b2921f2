"""`venn-abers`: inductive Venn-Abers prediction per class (Vovk, Petej and Fedorova 2015)."""

from __future__ import annotations

import numpy as np

from boxcal.calibrators.logit_maps.per_class import Array, Curve, PerClassFunction, one_per_run


class VennAbers(PerClassFunction):
    """p1 / (1 - p0 + p1), where p0 and p1 are the isotonic fits that a new sample of label 0 or 1 has joined.

    A probability equal to one that was seen counts as just above it.
    """

    name = "venn-abers"
    steps = True

    def curve(self, probabilities: Array, hits: Array) -> Curve:
        """Let a new sample of either label join the isotonic fit in every gap between the samples seen."""
        from boxcal.calibrators.fitting.kernels import isotonic_with_one_more  # noqa: PLC0415 - only fits need numba

        places, index, counts = np.unique(probabilities, return_inverse=True, return_counts=True)
        sums = np.bincount(index, weights=hits)
        p0, p1 = (isotonic_with_one_more(counts.astype(np.float64), sums, label) for label in (0.0, 1.0))
        return one_per_run(np.concatenate([[0.0], places]), p1 / (1.0 - p0 + p1))
