"""The fit of `ts`: one convex dimension, so Newton's method in float64, inside a bracket."""

from __future__ import annotations

import torch
from torch import Tensor

from calibrators.logit_maps.temperature import HIGHEST, LOWEST

ROUNDS = 100
CHUNK = 1 << 20
"""Entries of the logits worked on at once."""


def fit_temperature(scores: Tensor, labels: Tensor) -> tuple[float, float, int]:
    """Find the temperature of least NLL.

    The loss is convex in the inverse temperature t, with derivative E[z] - z_y and second derivative Var[z]
    under softmax(t z), averaged over the samples.

    Returns
    -------
    temperature : float
        Between 0.001 and 10,000; at either end where the data would have it beyond.
    slope : float
        The derivative of the mean loss in the log of the temperature that remains.
    rounds : int
        Passes over the data.
    """
    low, high = 1.0 / HIGHEST, 1.0 / LOWEST
    inverse, slope, rounds = 1.0, 0.0, 0
    while rounds < ROUNDS:
        rounds += 1
        slope, curvature = _derivatives(scores, labels, inverse)
        if slope > 0.0:
            high = inverse
        else:
            low = inverse
        if abs(slope) * inverse < 1e-14:
            break
        step = inverse - slope / curvature if curvature > 0.0 else -1.0
        if not low < step < high:
            step = (low * high) ** 0.5
        if abs(step - inverse) <= 1e-15 * inverse:
            break
        inverse = step
    return 1.0 / inverse, -slope * inverse, rounds


def _derivatives(scores: Tensor, labels: Tensor, inverse: float) -> tuple[float, float]:
    """First and second derivative of the mean loss in the inverse temperature, in chunks of rows."""
    rows = max(1, CHUNK // scores.shape[1])
    slope, curvature = 0.0, 0.0
    for z, y in zip(torch.split(scores, rows), torch.split(labels, rows), strict=True):
        centred = z - z.amax(dim=1, keepdim=True)
        weights = (centred * inverse).exp_()
        total = weights.sum(dim=1)
        weights *= centred
        mean = weights.sum(dim=1) / total
        weights *= centred
        square = weights.sum(dim=1) / total
        slope += float((mean - centred.gather(1, y[:, None])[:, 0]).sum())
        curvature += float((square - mean * mean).sum())
    return slope / len(labels), curvature / len(labels)
