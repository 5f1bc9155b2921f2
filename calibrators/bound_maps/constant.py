"""`pb`: one lower and one upper bound for every class and every sample (the paper's equation for PB)."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from calibrators.operator import Bounds


class ConstantBounds(nn.Module):
    """A scalar box `(lower, upper)`, with `0 <= lower <= 1/K <= upper <= 1`; vacuous when fresh.

    `lower` and `upper` are the paper's a and b, stored as float64 buffers.
    """

    name: ClassVar[str] = "pb"
    lower: Tensor
    upper: Tensor

    def __init__(self, num_classes: int, lower: float = 0.0, upper: float = 1.0) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.register_buffer("lower", torch.tensor(lower, dtype=torch.float64))
        self.register_buffer("upper", torch.tensor(upper, dtype=torch.float64))

    @property
    def is_vacuous(self) -> bool:
        """Whether the box holds every probability."""
        return self.lower.item() <= 0.0 and self.upper.item() >= 1.0

    def forward(self, logits: Tensor) -> Bounds:
        """Give the box for any batch."""
        del logits
        return Bounds(self.lower, self.upper)

    def describe(self) -> dict[str, Any]:
        """Return the two numbers."""
        return {"lower": self.lower.item(), "upper": self.upper.item()}
