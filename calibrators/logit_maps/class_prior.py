"""Adjustments of a fitted calibrator: offsets of classes, such as other class frequencies, and a temperature.

`fit` does not make it: class frequencies come from traffic without labels, see
`boxcal.calibrators.monitoring.candidates`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from boxcal.calibrators import formulas, tensor_ops
from boxcal.calibrators.logit_maps.base import LogitMap
from boxcal.calibrators.parametrised import parameter


class ClassPriorAdjustment(LogitMap):
    """`T(z) = (z + offsets) / temperature`, z the logits that a fitted map gives.

    With offsets `log(new / old class frequencies)` and temperature 1 this is Bayes' rule for class
    frequencies that have changed while the inputs of each class have not (Saerens et al. 2002).
    """

    name = "em"
    combines = False
    positive = ("adjustment_temperature",)

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.adjustment_offsets = parameter(torch.zeros(num_classes))
        self.adjustment_temperature = parameter(1.0)

    def forward(self, scores: Tensor) -> Tensor:
        """Add the offsets to (N, K) logits and divide by the temperature."""
        mapped: Tensor = formulas.class_prior(tensor_ops, self, scores)
        return mapped
