"""`fc` and `ta`: maps of the features that the backbone's last layer reads."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from boxcal.calibrators import formulas, tensor_ops
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.parametrised import Limits, parameter, vector

UNCLIPPED = 1e30
ROTATIONS = 10
"""How many random rotations are averaged."""


class LastLayerMap(LogitMap):
    """A map of features (N, D) to logits that holds the last layer, weight (K, D) and bias (K,)."""

    reads = "features"
    head_weight: Tensor
    head_bias: Tensor

    def __init__(self, num_classes: int, num_features: int = 1) -> None:
        super().__init__(num_classes)
        self.register_buffer("head_weight", torch.zeros(num_classes, num_features, dtype=torch.float64))
        self.register_buffer("head_bias", torch.zeros(num_classes, dtype=torch.float64))

    @property
    def width(self) -> int:
        """D, the number of features."""
        return self.head_weight.shape[1]

    def prepare(self, data: ValidationSet) -> None:
        """Take the last layer, such that the logits of each row have the mean 0."""
        if data.head is not None:
            self.head_weight, self.head_bias = (part - part.mean(dim=0) for part in data.head)

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], num_classes: int) -> Self:
        """Make room for a last layer of the stored width."""
        head = tensors.get("head_weight")
        return cls(num_classes, head.shape[1] if head is not None and head.ndim == 2 else 1)

    def describe(self) -> dict[str, Any]:
        """Return the one number that was fitted."""
        return {name: value.item() for name, value in self.named_parameters()}


class FeatureClipping(LastLayerMap):
    """`T(z) = W clip(z, -radius, radius) + w` (Tao et al. 2025)."""

    name = "fc"
    perturbations = 8
    positive = ("radius",)

    def __init__(self, num_classes: int, num_features: int = 1) -> None:
        super().__init__(num_classes, num_features)
        self.radius = parameter(UNCLIPPED)
        self._largest = 1.0

    def forward(self, scores: Tensor) -> Tensor:
        """Map (N, D) features to logits."""
        mapped: Tensor = formulas.feature_clipping(tensor_ops, self, scores)
        return mapped

    def parameters_from(self, coordinates: Tensor) -> dict[str, Tensor]:
        """Read the one coordinate, the log of the radius."""
        return {"radius": coordinates[0].exp()}

    def prepare(self, data: ValidationSet) -> None:
        """Take the last layer, and how large the features are."""
        super().prepare(data)
        if data.features is not None:
            self._largest = data.features.abs().max().item() or 1.0

    def starts(self) -> Sequence[Tensor]:
        """Radii from the largest feature downwards."""
        return [vector(math.log(self._largest) - step / 4) for step in range(24)]

    def limits(self) -> Limits:
        """Limit the radius to a millionth of the largest feature up to it."""
        return [(math.log(self._largest) - math.log(1e6), math.log(self._largest))]


class TiltAndAverage(LastLayerMap):
    """`T(z) = (W R) z + w`, R the average of random rotations by the same angle (Cho et al. 2024).

    A rotation by the angle in D / 2 random orthogonal planes is `cos I + sin J` with a random skew J, so the
    average of ten needs only the average of their J: `W R = cos W + sin (W J)`, and the angle is all there is
    to fit. At angle 0 nothing changes.
    """

    name = "ta"
    turned_weight: Tensor

    def __init__(self, num_classes: int, num_features: int = 1) -> None:
        super().__init__(num_classes, num_features)
        self.register_buffer("turned_weight", torch.zeros_like(self.head_weight))
        self.angle = parameter(0.0)

    def forward(self, scores: Tensor) -> Tensor:
        """Map (N, D) features to logits."""
        mapped: Tensor = formulas.tilt_and_average(tensor_ops, self, scores)
        return mapped

    def prepare(self, data: ValidationSet) -> None:
        """Take the last layer, and turn it by a right angle in planes drawn with fixed seeds."""
        super().prepare(data)
        turned = [_quarter_turn(self.head_weight, seed) for seed in range(ROTATIONS)]
        self.turned_weight = torch.stack(turned).mean(dim=0)

    def starts(self) -> Sequence[Tensor]:
        """No tilt, and angles up to nearly a right one."""
        return [vector(angle) for angle in (0.0, 0.4, 0.8, 1.2)]

    def limits(self) -> Limits:
        """Angles of nothing to nearly a right one."""
        return [(0.0, math.pi / 2 - 1e-3)]


def _quarter_turn(weight: Tensor, seed: int) -> Tensor:
    """Turn rows (K, D) by a right angle in D / 2 random orthogonal planes; an odd dimension stays out."""
    size = weight.shape[1]
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    inside = weight @ basis
    half = size // 2
    turned = torch.zeros_like(inside)
    turned[:, :half] = -inside[:, half : 2 * half]
    turned[:, half : 2 * half] = inside[:, :half]
    back: Tensor = turned @ basis.T
    return back
