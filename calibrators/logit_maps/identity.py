"""`uncalibrated`: the logits as they come; the first stage of every method that changes only the box."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from calibrators.logit_maps.base import LogitMap


class Identity(LogitMap):
    """Return the logits unchanged; it has no parameters."""

    name: ClassVar[str] = "uncalibrated"

    def forward(self, scores: Tensor) -> Tensor:
        """Return (N, K) logits as they are."""
        return scores

    def starts(self) -> Sequence[Tensor]:
        """One start: the empty vector."""
        return [torch.empty(0, dtype=torch.float64)]
