"""The objective of a joint fit: coordinates of a map and a box to the mean loss and its exact gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

from calibrators.fitting import kernels
from calibrators.fitting.constant_box import NARROWEST, WIDEST
from calibrators.logit_maps.base import LogitMap

Array = np.ndarray[Any, Any]


def dense_loss(scores: Array, labels: Array, lower: Array, upper: Array) -> tuple[Array, Array, Array, Array]:
    """Loss of every row under its own box, and the derivatives in scores, lower and upper.

    Shapes: scores (N, K); labels, lower, upper (N,); returns (N,), (N, K), (N,), (N,).
    """
    losses, d_lower, d_upper = np.empty(len(scores)), np.empty(len(scores)), np.empty(len(scores))
    d_scores = np.empty(scores.shape)
    kernels.dense_nll(scores, labels, lower, upper, losses, d_scores, d_lower, d_upper)
    return losses, d_scores, d_lower, d_upper


class JointObjective:
    """Mean loss of `BCSoftmax(T(g); a, b)` over a validation set, with its penalty and its gradient.

    The map's coordinates come first, then, where a box is learned, log of a K and log of the slack of b
    (see `constant_box`).
    """

    def __init__(self, logit_map: LogitMap, with_box: bool, scores: Tensor, labels: Tensor) -> None:
        self.logit_map = logit_map
        self.with_box = with_box
        self.scores = scores
        self.labels = labels.numpy()
        self.map_size = sum(parameter.numel() for parameter in logit_map.parameters())

    @property
    def limits(self) -> Sequence[tuple[float | None, float | None]]:
        """Limits of every coordinate."""
        own = self.logit_map.limits() or [(None, None)] * self.map_size
        return [*own, *([(NARROWEST, WIDEST)] * (2 * self.with_box))]

    def box(self, coordinates: Tensor) -> tuple[Tensor, Tensor]:
        """Give the scalar box at the coordinates, differentiably."""
        zero = torch.zeros((), dtype=torch.float64)
        if not self.with_box:
            return zero, zero + 1.0
        K = self.logit_map.num_classes
        fraction, slack = coordinates[self.map_size].exp(), coordinates[self.map_size + 1].exp()
        upper = 1.0 / K + (1.0 - 1.0 / K) * (1.0 - fraction) * (1.0 - slack)
        return fraction / K, upper

    def __call__(self, coordinates: Array) -> tuple[float, Array]:
        """Return the objective and its gradient."""
        x = torch.tensor(coordinates, dtype=torch.float64, requires_grad=True)
        parameters = self.logit_map.parameters_from(x[: self.map_size])
        mapped = functional_call(self.logit_map, parameters, (self.scores,))
        lower, upper = (bound.expand(len(self.labels)) for bound in self.box(x))
        outputs = (mapped, lower, upper)
        losses, *derivatives = dense_loss(
            mapped.detach().numpy(),
            self.labels,
            np.ascontiguousarray(lower.detach().numpy()),
            np.ascontiguousarray(upper.detach().numpy()),
        )
        value = float(losses.mean())
        wanted = [
            (out, torch.from_numpy(d) / len(losses))
            for out, d in zip(outputs, derivatives, strict=True)
            if out.requires_grad
        ]
        penalty = self.logit_map.penalty(parameters)
        if penalty is not None:
            value += float(penalty)
            wanted.append((penalty, torch.ones_like(penalty)))
        if not math.isfinite(value):
            return math.inf, np.zeros_like(coordinates)
        torch.autograd.backward([out for out, _ in wanted], [d for _, d in wanted])
        gradient = x.grad if x.grad is not None else torch.zeros_like(x)
        return value, gradient.numpy()
