"""Calibration mathematics: tensors in, tensors out; no HTTP, no files."""

from calibrators.operator import Bounds, box_constrained_softmax

__all__ = ["Bounds", "box_constrained_softmax"]
