"""`matrix`: matrix scaling, an affine map of the logits (Guo et al. 2017)."""

from __future__ import annotations

from boxcal.calibrators.logit_maps.linear import RegularisedLinear


class MatrixScaling(RegularisedLinear):
    """`T(g) = W g + w'`, regularised off the diagonal and in the intercept."""

    name = "matrix"
