"""`pb-mlp`: bounds that a small network sets for every sample (section 3.4 of the paper)."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np

from boxcal.calibrators.array_ops import sigmoid
from boxcal.calibrators.maps.base import BoxMap
from boxcal.calibrators.maps.constant_box import box_at
from boxcal.calibrators.maps.network import (
    DRAWS,
    NetworkMap,
    forward,
    fresh_network,
    network_outputs,
    network_shapes,
)
from boxcal.calibrators.maps.parameters import Array, Gradients, Map, Parameters, Shapes, Values, Vjp

VACUOUS = -40.0
"""An output whose logistic is 0 in float64."""
SATURATED = -4.0
"""Starts keep above this: below, the slope of the logistic is too small to descend along."""


class InstanceDependentBounds(NetworkMap, BoxMap):
    """One box per row, from the ten largest mapped logits; as good as vacuous when fresh."""

    name = "pb-mlp"
    shapes: ClassVar[Shapes] = network_shapes(2)

    def fresh(self) -> dict[str, Any]:
        return fresh_network(self.num_classes, [VACUOUS, VACUOUS])

    def formula(self, ops: ModuleType, p: Parameters, logits: Values) -> tuple[Values, Values]:
        """Give lower and upper, each (N, 1), for mapped logits (N, K)."""
        chances = ops.sigmoid(network_outputs(ops, p, logits))
        return box_at(ops, chances[:, :1], chances[:, 1:], logits.shape[1])

    def bounds(self, p: Parameters, reading: Array) -> tuple[Array, Array, Vjp]:
        """Ask the network: both outputs o are logits of a share f or s, and df = f (1 - f) do."""
        outputs, network_back = forward(p, reading)
        classes = self.num_classes
        (fraction, slack), (rest, range_kept) = sigmoid(outputs), sigmoid(-outputs)
        share = 1.0 - 1.0 / classes
        upper = 1.0 / classes + share * rest * range_kept

        def back(by_lower: Array, by_upper: Array) -> tuple[Gradients, Array]:
            through = share * np.where(upper <= 1.0, by_upper, 0.0)
            by_outputs = np.stack(
                [
                    fraction * rest * (by_lower / classes - through * range_kept),
                    -through * rest * slack * range_kept,
                ]
            )
            found: tuple[Gradients, Array] = network_back(by_outputs)
            return found

        return fraction / classes, np.clip(upper, 1.0 / classes, 1.0), back

    def starts_at(self, box: Array) -> Sequence[Sequence[Array]]:
        """Give the places from which networks descend, each as coordinates of several.

        They answer the given box everywhere, as far as that leaves slopes to descend along; or the middle.
        """
        near = self.constant_outputs(np.clip(box, SATURATED, -0.05))
        return [[self.started(outputs, seed) for seed in range(DRAWS)] for outputs in (near, [0.0, 0.0])]

    def coordinates_of(self, other: Map) -> Array:
        """Give coordinates at which every row has the box that a constant one gives it."""
        return self.started(self.constant_outputs(other.coordinates()), 0)

    @staticmethod
    def constant_outputs(box: Array) -> list[float]:
        """Give outputs whose logistics are the exponentials of (log of lower K, log of slack)."""
        return [float(value - np.log1p(-np.exp(value))) for value in box]

    def prepare(self, logits: Array) -> None:
        """Let the network see the mapped logits."""
        self.prepare_network(logits)

    def reading_as(self, other: BoxMap) -> Self:
        """Give a map whose network reads what that of another one reads."""
        own = self.moved(self.coordinates())
        if isinstance(other, InstanceDependentBounds):
            own.adopt_network(other)
        return own
