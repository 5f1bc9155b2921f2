"""`dpb`: dual probability bounding, which learns the dual variable of a box (section 4.3 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.parameters import Array, Gradients, Limits, Parameters, Shapes, Values, Vjp


class DualProbabilityBounding(LogitMap):
    """`T(g) = g - S_d(w * g)`, with the soft threshold `S_d(u) = u - clip(u, -d, d)`.

    `shift_weights` (K,) is the paper's w >= 0 and `shift_threshold` its d > 0. Every class whose weighted
    logit exceeds d in size is drawn back. Weights of zero change nothing.
    """

    name = "dpb"
    shapes: ClassVar[Shapes] = {"shift_weights": ("K",), "shift_threshold": ()}
    perturbations = 4
    starts_kept = 9

    def fresh(self) -> dict[str, Any]:
        return {"shift_weights": np.zeros(self.num_classes), "shift_threshold": 1.0}

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Shift (N, K) logits by their soft-thresholded, weighted selves."""
        weighted, threshold = p["shift_weights"] * scores, p["shift_threshold"]
        return scores - (weighted - ops.clip(weighted, -threshold, threshold))

    def vjp(self, p: Parameters, scores: Array, precomputed: Any = None) -> tuple[Array, Vjp]:
        """Shift: beyond the threshold dT = dg - w dg - g dw + sign dd."""
        weights, threshold = p["shift_weights"], p["shift_threshold"]
        weighted = weights * scores
        clipped = np.clip(weighted, -threshold, threshold)
        beyond = np.abs(weighted) > threshold

        def back(by_mapped: Array, through: bool) -> tuple[Gradients, Array | None]:
            moved = by_mapped * beyond
            gradients = {
                "shift_weights": -np.einsum("nk,nk->k", moved, scores),
                "shift_threshold": np.vdot(moved, np.sign(weighted)),
            }
            return gradients, by_mapped - moved * weights if through else None

        return scores - (weighted - clipped), back

    def at(self, coordinates: Array) -> dict[str, Array]:
        """Read K weights as they are, then the log of the threshold."""
        return {"shift_weights": coordinates[:-1], "shift_threshold": np.exp(coordinates[-1])}

    def slopes(self, coordinates: Array, gradients: Mapping[str, Array]) -> Array:
        """Multiply the derivative in the threshold by it."""
        by_log = np.exp(coordinates[-1]) * gradients["shift_threshold"]
        return np.concatenate([gradients["shift_weights"], [by_log]])

    def coordinates(self) -> Array:
        """Give the weights and the log of the threshold."""
        threshold = self.parameters["shift_threshold"].reshape(1)
        return np.concatenate([self.parameters["shift_weights"], np.log(threshold)])

    def starts(self) -> Sequence[Array]:
        """Equal weights with thresholds that nearly all to hardly any logits exceed, and drawn weights."""
        equal = [
            np.array([*[weight] * self.num_classes, math.log(threshold)])
            for weight, threshold in ((0.5, 0.01), (0.25, 1e-5), (0.5, 1.0), (0.9, 3.0), (0.25, 0.1))
        ]
        rng = np.random.default_rng(0)
        drawn = [np.append(1.5 * rng.random(self.num_classes), end) for end in (-4.0, -1.0, 1.0, 2.0)]
        return [*equal, *drawn]

    def limits(self) -> Limits:
        """Weights of zero to ten; thresholds of a millionth to a million."""
        return [(0.0, 10.0)] * self.num_classes + [(math.log(1e-6), math.log(1e6))]

    def invalid_reason(self) -> str | None:
        """Say so if a weight or the threshold is negative."""
        lowest = min(self.parameters["shift_weights"].min().item(), self.parameters["shift_threshold"].item())
        return None if lowest >= 0.0 else f"a shift weight or the shift threshold is {lowest}, below 0"
