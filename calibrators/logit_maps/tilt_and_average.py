"""`ta`: tilt and average, the class vectors of the last layer turned by an angle (Cho et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.logit_maps.feature_clipping import width_of
from boxcal.calibrators.parametrised import Limits, parameter, vector

ROTATIONS = 10
"""How many random rotations are averaged."""


class TiltAndAverage(LogitMap):
    """`T(z) = (W R) z + w`, R the average of random rotations that turn every vector by the same angle.

    A rotation by the angle in D / 2 random orthogonal planes is `cos I + sin J` with a random skew J, so the
    average of ten needs only the average of their J: `W R = cos W + sin (W J)`, and the angle is all there is
    to fit. At angle 0 nothing changes.
    """

    name = "ta"
    reads = "features"
    head_weight: Tensor
    head_bias: Tensor
    turned_weight: Tensor

    def __init__(self, num_classes: int, num_features: int = 1) -> None:
        super().__init__(num_classes)
        for name in ("head_weight", "turned_weight"):
            self.register_buffer(name, torch.zeros(num_classes, num_features, dtype=torch.float64))
        self.register_buffer("head_bias", torch.zeros(num_classes, dtype=torch.float64))
        self.angle = parameter(0.0)

    @property
    def width(self) -> int:
        """D, the number of features."""
        return self.head_weight.shape[1]

    def forward(self, scores: Tensor) -> Tensor:
        """Map (N, D) features to logits."""
        tilted = self.angle.cos() * self.head_weight + self.angle.sin() * self.turned_weight
        return scores @ tilted.T + self.head_bias

    def prepare(self, data: ValidationSet) -> None:
        """Take the head, and turn it by a right angle in planes drawn with a fixed seed."""
        if data.head is not None:
            self.head_weight, self.head_bias = data.head
            self.turned_weight = (
                sum(
                    (_quarter_turn(self.head_weight, seed) for seed in range(ROTATIONS)),
                    torch.zeros_like(self.head_weight),
                )
                / ROTATIONS
            )

    def starts(self) -> Sequence[Tensor]:
        """No tilt, and angles up to nearly a right one."""
        return [vector(angle) for angle in (0.0, 0.4, 0.8, 1.2)]

    def limits(self) -> Limits:
        """Angles of nothing to nearly a right one."""
        return [(0.0, math.pi / 2 - 1e-3)]

    @classmethod
    def restored(cls, tensors: Mapping[str, Tensor], num_classes: int) -> Self:
        """Make room for a head of the stored width."""
        return cls(num_classes, width_of(tensors))

    def describe(self) -> dict[str, Any]:
        """Return the angle, in radians."""
        return {"angle": self.angle.item()}


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
