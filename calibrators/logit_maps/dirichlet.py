"""`dirichlet`: Dirichlet calibration, an affine map of log probabilities (Kull et al. 2019)."""

from __future__ import annotations

from torch import Tensor

from boxcal.calibrators.logit_maps.linear import RegularisedLinear


class DirichletCalibration(RegularisedLinear):
    """`T(g) = W log softmax(g) + w'`, regularised off the diagonal and in the intercept."""

    name = "dirichlet"

    def reading(self, scores: Tensor) -> Tensor:
        """Take the log probabilities of (N, K) logits."""
        return scores.log_softmax(dim=1)
