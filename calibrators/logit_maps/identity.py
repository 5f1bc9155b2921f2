"""`uncalibrated`: the logits as they come; the first stage of every method that changes only the box."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.parametrised import vector


class Identity(LogitMap):
    """Return the logits unchanged; it has no parameters."""

    name = "uncalibrated"

    def forward(self, scores: Tensor) -> Tensor:
        """Return (N, K) logits as they are."""
        return scores

    def starts(self) -> Sequence[Tensor]:
        """One start: the empty vector."""
        return [vector()]
