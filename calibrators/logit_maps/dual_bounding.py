"""`dpb`: dual probability bounding, which learns the dual variable of a box (section 4.3 of the paper)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from boxcal.calibrators import formulas, tensor_ops
from boxcal.calibrators.data import ValidationSet
from boxcal.calibrators.logit_maps.base import LogitMap, Solution
from boxcal.calibrators.parametrised import Limits, parameter, vector


class DualProbabilityBounding(LogitMap):
    """`T(g) = g - S_d(w * g)`, with the soft threshold `S_d(u) = u - clip(u, -d, d)`.

    `shift_weights` (K,) is the paper's w >= 0 and `shift_threshold` its d > 0. Every class whose weighted
    logit exceeds d in size is drawn back. Weights of zero change nothing.
    """

    name = "dpb"
    perturbations = 4
    followed = 9

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.shift_weights = parameter(torch.zeros(num_classes))
        self.shift_threshold = parameter(1.0)

    def forward(self, scores: Tensor) -> Tensor:
        """Shift (N, K) logits by their soft-thresholded, weighted selves."""
        mapped: Tensor = formulas.dual_bounding(tensor_ops, self, scores)
        return mapped

    def parameters_from(self, coordinates: Tensor) -> dict[str, Tensor]:
        """Read K weights as they are, then the log of the threshold."""
        return {"shift_weights": coordinates[:-1], "shift_threshold": coordinates[-1].exp()}

    def starts(self) -> Sequence[Tensor]:
        """Equal weights with thresholds that nearly all to hardly any logits exceed, and drawn weights."""
        equal = [
            vector(*[weight] * self.num_classes, math.log(threshold))
            for weight, threshold in ((0.5, 0.01), (0.25, 1e-5), (0.5, 1.0), (0.9, 3.0), (0.25, 0.1))
        ]
        generator = torch.Generator().manual_seed(0)
        drawn = [
            torch.cat([1.5 * torch.rand(self.num_classes, generator=generator, dtype=torch.float64), end])
            for end in (vector(-4.0), vector(-1.0), vector(1.0), vector(2.0))
        ]
        return [*equal, *drawn]

    def limits(self) -> Limits:
        """Weights of zero to ten; thresholds of a millionth to a million."""
        return [(0.0, 10.0)] * self.num_classes + [(math.log(1e-6), math.log(1e6))]

    def solve(self, data: ValidationSet, seed: int, tick: Callable[[float], None]) -> Solution | None:
        """Search many logits in float32 first; few are left to descent from the starts."""
        from boxcal.calibrators.fitting import soft_threshold  # noqa: PLC0415 - only fits need scipy
        from boxcal.calibrators.fitting.closed_form_gradients import DualBounding  # noqa: PLC0415

        if data.logits.numel() < soft_threshold.MANY:
            return None
        minimum = soft_threshold.fit_shift(
            DualBounding(self, None, data.scores, data.labels, data.weights),
            [start.numpy() for start in self.starts()],
            seed=seed,
            thorough=self.thorough,
            tick=tick,
        )
        self.set_coordinates(torch.from_numpy(minimum.coordinates))
        return Solution(minimum.gradient_norm, minimum.starts, minimum.starts_agreeing, minimum.evaluations)

    def invalid_reason(self) -> str | None:
        """Say so if a weight or the threshold is negative."""
        return formulas.invalid_shift(self, self.num_classes)
