"""`fc`: feature clipping before the backbone's last layer (Tao et al. 2025)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.parametrised import Limits, parameter, vector

UNCLIPPED = 1e30


class FeatureClipping(LogitMap):
    """`T(z) = W clip(z, -radius, radius) + w`, with the backbone's own head W (K, D) and w (K,)."""

    name = "fc"
    reads = "features"
    perturbations = 8
    head_weight: Tensor
    head_bias: Tensor

    def __init__(self, num_classes: int, num_features: int = 1) -> None:
        super().__init__(num_classes)
        self.register_buffer("head_weight", torch.zeros(num_classes, num_features, dtype=torch.float64))
        self.register_buffer("head_bias", torch.zeros(num_classes, dtype=torch.float64))
        self.radius = parameter(UNCLIPPED)
        self._largest = 1.0

    @property
    def width(self) -> int:
        """D, the number of features."""
        return self.head_weight.shape[1]

    def forward(self, scores: Tensor) -> Tensor:
        """Map (N, D) features to logits."""
        return scores.clamp(-self.radius, self.radius) @ self.head_weight.T + self.head_bias

    def parameters_from(self, coordinates: Tensor) -> dict[str, Tensor]:
        """Read the one coordinate, the log of the radius."""
        return {"radius": coordinates[0].exp()}

    def prepare(self, data: ValidationSet) -> None:
        """Take the head, and how large the features are."""
        if data.head is not None and data.features is not None:
            self.head_weight, self.head_bias = data.head
            self._largest = data.features.abs().max().item() or 1.0

    def starts(self) -> Sequence[Tensor]:
        """Radii from the largest feature downwards."""
        return [vector(math.log(self._largest) - step / 4) for step in range(24)]

    def limits(self) -> Limits:
        """Limit the radius to a millionth of the largest feature up to it."""
        return [(math.log(self._largest) - math.log(1e6), math.log(self._largest))]

    def invalid_reason(self) -> str | None:
        """Say so if the radius is not positive."""
        return None if self.radius.item() > 0.0 else f"the radius {self.radius.item()} is not positive"

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], num_classes: int) -> Self:
        """Make room for a head of the stored width."""
        return cls(num_classes, width_of(tensors))

    def describe(self) -> dict[str, Any]:
        """Return the radius."""
        return {"radius": self.radius.item()}


def width_of(tensors: Mapping[str, Tensor]) -> int:
    """Read the number of features off a stored head."""
    head = tensors.get("head_weight")
    return head.shape[1] if head is not None and head.ndim == 2 else 1
