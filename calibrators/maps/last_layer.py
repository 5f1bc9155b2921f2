"""`fc` and `ta`: maps of the features that the backbone's last layer reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.parameters import Array, Gradients, Limits, Parameters, Shapes, Values, Vjp

UNCLIPPED = 1e30
ROTATIONS = 10
"""How many random rotations are averaged."""


class LastLayerMap(LogitMap):
    """A map of features (N, D) to logits that contains the last layer, weight (K, D) and bias (K,)."""

    reads = "features"

    def fresh(self) -> dict[str, Any]:
        """Begin with a last layer of one feature."""
        return {"head_weight": np.zeros((self.num_classes, 1)), "head_bias": np.zeros(self.num_classes)}

    @property
    def width(self) -> int:
        """D, the number of features."""
        return int(self.parameters["head_weight"].shape[1])

    def prepare(self, data: ValidationSet, tick: Callable[[float], None] = lambda fraction: None) -> None:
        """Take the last layer, such that the logits of each row have the mean 0."""
        if data.head is not None:
            weight, bias = (part - part.mean(axis=0) for part in data.head)
            self.parameters = self.parameters | {"head_weight": weight, "head_bias": bias}

    def describe(self) -> dict[str, Any]:
        """Return the one number that was fitted."""
        return {name: value.item() for name, value in self.searched.items()}


class FeatureClipping(LastLayerMap):
    """`T(z) = W clip(z, -radius, radius) + w` (Tao et al. 2025)."""

    name = "fc"
    shapes: ClassVar[Shapes] = {"radius": (), "head_weight": ("K", "D"), "head_bias": ("K",)}
    prepared = ("head_weight", "head_bias")
    positive = ("radius",)
    perturbations = 8

    def __init__(self, num_classes: int, parameters: Mapping[str, Any] | None = None) -> None:
        super().__init__(num_classes, parameters)
        self._largest = 1.0

    def fresh(self) -> dict[str, Any]:
        return {"radius": UNCLIPPED, **super().fresh()}

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Map (N, D) features to logits."""
        return ops.clip(scores, -p["radius"], p["radius"]) @ p["head_weight"].T + p["head_bias"]

    def vjp(self, p: Parameters, scores: Array, precomputed: Any = None) -> tuple[Array, Vjp]:
        """Clip: features beyond the radius move with it, dT = W (dz or sign dr)."""
        radius, weight = p["radius"], p["head_weight"]
        beyond = np.abs(scores) > radius

        def back(by_mapped: Array, through: bool) -> tuple[Gradients, Array | None]:
            by_clipped = by_mapped @ weight
            gradients = {"radius": np.vdot(by_clipped, np.sign(scores) * beyond)}
            return gradients, np.where(beyond, 0.0, by_clipped) if through else None

        return np.clip(scores, -radius, radius) @ weight.T + p["head_bias"], back

    def at(self, coordinates: Array) -> dict[str, Array]:
        """Read the one coordinate, the log of the radius."""
        return self.parameters | {"radius": np.exp(coordinates[0])}

    def slopes(self, coordinates: Array, gradients: Mapping[str, Array]) -> Array:
        return np.array([np.exp(coordinates[0]) * gradients["radius"]])

    def coordinates(self) -> Array:
        """Give the log of the radius."""
        return np.log(self.parameters["radius"].reshape(1))

    def prepare(self, data: ValidationSet, tick: Callable[[float], None] = lambda fraction: None) -> None:
        """Take the last layer, and how large the features are."""
        super().prepare(data)
        if data.features is not None:
            self._largest = float(np.abs(data.features).max()) or 1.0

    def starts(self) -> Sequence[Array]:
        """Radii from the largest feature downwards."""
        return [np.array([math.log(self._largest) - step / 4]) for step in range(24)]

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
    shapes: ClassVar[Shapes] = {
        "angle": (),
        "head_weight": ("K", "D"),
        "head_bias": ("K",),
        "turned_weight": ("K", "D"),
    }
    prepared = ("head_weight", "head_bias", "turned_weight")
    combines = True

    def fresh(self) -> dict[str, Any]:
        return {"angle": 0.0, **super().fresh(), "turned_weight": np.zeros((self.num_classes, 1))}

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Map (N, D) features to logits."""
        tilted = ops.cos(p["angle"]) * p["head_weight"] + ops.sin(p["angle"]) * p["turned_weight"]
        return scores @ tilted.T + p["head_bias"]

    def vjp(self, p: Parameters, scores: Array, precomputed: Any = None) -> tuple[Array, Vjp]:
        """Tilt: dT = (cos W J - sin W) z d angle + W R dz."""
        cos, sin = np.cos(p["angle"]), np.sin(p["angle"])
        weight, turned = p["head_weight"], p["turned_weight"]
        tilted = cos * weight + sin * turned

        def back(by_mapped: Array, through: bool) -> tuple[Gradients, Array | None]:
            gradients = {"angle": np.vdot(by_mapped.T @ scores, cos * turned - sin * weight)}
            return gradients, by_mapped @ tilted if through else None

        return scores @ tilted.T + p["head_bias"], back

    def prepare(self, data: ValidationSet, tick: Callable[[float], None] = lambda fraction: None) -> None:
        """Take the last layer, and turn it by a right angle in planes drawn with fixed seeds."""
        super().prepare(data)
        weight = self.parameters["head_weight"]
        turned = np.mean([_quarter_turn(weight, seed) for seed in range(ROTATIONS)], axis=0)
        self.parameters = self.parameters | {"turned_weight": turned}

    def starts(self) -> Sequence[Array]:
        """No tilt, and angles up to nearly a right one."""
        return [np.array([angle]) for angle in (0.0, 0.4, 0.8, 1.2)]

    def limits(self) -> Limits:
        """Angles of nothing to nearly a right one."""
        return [(0.0, math.pi / 2 - 1e-3)]


def _quarter_turn(weight: Array, seed: int) -> Array:
    """Turn rows (K, D) by a right angle in D / 2 random orthogonal planes; an odd dimension stays out."""
    size = weight.shape[1]
    basis, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(size, size)))
    inside = weight @ basis
    half = size // 2
    turned = np.zeros_like(inside)
    turned[:, :half] = -inside[:, half : 2 * half]
    turned[:, half : 2 * half] = inside[:, :half]
    back: Array = turned @ basis.T
    return back
