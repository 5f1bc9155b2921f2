"""The box-constrained softmax, its gradient and the bounds it takes."""

from boxcal.calibrators.operator.bounds import Bounds, EffectiveBounds
from boxcal.calibrators.operator.box_softmax import (
    box_constrained_softmax,
    lower_bounded_softmax,
    upper_bounded_softmax,
)

__all__ = [
    "Bounds",
    "EffectiveBounds",
    "box_constrained_softmax",
    "lower_bounded_softmax",
    "upper_bounded_softmax",
]
