"""`lb`: logit bounding, which clips the logits instead of the probabilities (section 4.1 of the paper)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import numpy as np

from boxcal.calibrators.array_ops import row_sum
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.parameters import Array, Gradients, Limits, Parameters, Shapes, Values, Vjp


class LogitBounding(LogitMap):
    """`T(g) = clip(g, c |g|, C |g|)` with |g| the Euclidean norm of the row, and 0 its largest logit.

    `logit_lower` and `logit_upper` are the paper's c and C divided by that norm, tanh(c') and
    tanh(c' + softplus(C')): -1 <= c <= C <= 1. At -1 and 1 nothing is clipped. What the limits clip depends
    on the number added to a row, which the paper leaves open; with 0 at the mean, overconfident logits have a
    much higher NLL.
    """

    name = "lb"
    shapes: ClassVar[Shapes] = {"logit_lower": (), "logit_upper": (), "from_largest": ()}
    prepared = ("from_largest",)

    def fresh(self) -> dict[str, Any]:
        return {"logit_lower": -1.0, "logit_upper": 1.0, "from_largest": 1.0}

    def formula(self, ops: ModuleType, p: Parameters, scores: Values) -> Values:
        """Clip (N, K) logits to limits that grow with the row's norm."""
        scores = scores - ops.amax(scores, 1)[:, None]
        norm = ops.norm(scores)
        return ops.clip(scores, p["logit_lower"] * norm, p["logit_upper"] * norm)

    def vjp(self, p: Parameters, scores: Array, precomputed: Any = None) -> tuple[Array, Vjp]:
        """Clip; classes at a limit move with it: dT_k = |g| dc + c d|g|, and d|g| = (g / |g|) dg."""
        largest = scores.argmax(axis=1)[:, None]
        scores = scores - np.take_along_axis(scores, largest, axis=1)
        norm = np.linalg.norm(scores, axis=1, keepdims=True)
        lower, upper = p["logit_lower"], p["logit_upper"]
        below, above = scores < lower * norm, scores > upper * norm

        def back(by_mapped: Array, through: bool) -> tuple[Gradients, Array | None]:
            by_low, by_high = (row_sum(by_mapped * side)[:, 0] for side in (below, above))
            gradients = {"logit_lower": by_low @ norm[:, 0], "logit_upper": by_high @ norm[:, 0]}
            if not through:
                return gradients, None
            by_norm = (lower * by_low + upper * by_high)[:, None]
            by_scores = np.where(below | above, 0.0, by_mapped)
            by_scores += by_norm * scores / np.maximum(norm, 1e-300)
            by_largest = np.take_along_axis(by_scores, largest, axis=1)
            by_largest -= row_sum(by_scores)
            np.put_along_axis(by_scores, largest, by_largest, axis=1)
            return gradients, by_scores

        return np.clip(scores, lower * norm, upper * norm), back

    def at(self, coordinates: Array) -> dict[str, Array]:
        """Read the lower limit, and the upper one as the share of what lies above the lower."""
        lower, share = coordinates
        return self.parameters | {"logit_lower": lower, "logit_upper": lower + (1.0 - lower) * share}

    def slopes(self, coordinates: Array, gradients: Mapping[str, Array]) -> Array:
        """Carry derivatives in both limits on to the lower one and the share."""
        lower, share = coordinates
        by_lower, by_upper = gradients["logit_lower"], gradients["logit_upper"]
        return np.array([by_lower + by_upper * (1.0 - share), by_upper * (1.0 - lower)])

    def coordinates(self) -> Array:
        """Give the lower limit and the share."""
        lower, upper = self.parameters["logit_lower"].item(), self.parameters["logit_upper"].item()
        return np.array([lower, (upper - lower) / (1.0 - lower)])

    def starts(self) -> Sequence[Array]:
        """Limits from the whole range down to narrow ones below the largest logit."""
        uppers = (1.0, -0.003, -0.01, -0.03, -0.06, -0.1, -0.2, -0.35)
        lowers = (-1.0, -0.7, -0.5, -0.3, -0.2, -0.12, -0.05)
        return [
            np.array([low, (high - low) / (1.0 - low)]) for high in uppers for low in lowers if low < high
        ]

    def limits(self) -> Limits:
        """Limit the lower end to -1 to just below 1, and the share to 0 to 1."""
        return [(-1.0, 1.0 - 1e-6), (0.0, 1.0)]

    def invalid_reason(self) -> str | None:
        """Say so if the limits are not in order."""
        lower, upper = self.parameters["logit_lower"].item(), self.parameters["logit_upper"].item()
        if self.parameters["from_largest"] != 1.0:
            return f"from_largest is {self.parameters['from_largest']}, not 1"
        in_order = -1.0 <= lower <= upper <= 1.0
        return None if in_order else f"the logit limits {lower} and {upper} are out of order"
