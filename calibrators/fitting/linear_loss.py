"""The objective of `vector`, `sms`, `matrix` and `dirichlet`: softmax regression with a ridge penalty."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.threads import SMALL, over_rows

if TYPE_CHECKING:
    from boxcal.calibrators.logit_maps.linear import Ridge

Array = np.ndarray[Any, Any]


class LinearLoss:
    """Mean NLL of `softmax(W x + w')` plus the penalty, and its gradient, over the flat (W, w').

    Parameters
    ----------
    read : Tensor
        x, (N, K) float64.
    labels : Tensor
        (N,) int64.
    shape : sequence of int
        (K, K), or (K,) for a diagonal W.
    ridge : Ridge
    weights : Tensor, optional
        (N,) float64, of mean 1.
    """

    def __init__(
        self, read: Tensor, labels: Tensor, shape: torch.Size, ridge: Ridge, weights: Tensor | None = None
    ) -> None:
        self.read, self.labels, self.shape, self.weights = read, labels, shape, weights
        self.anchor = torch.eye(shape[0], dtype=torch.float64) if len(shape) == 2 else torch.ones(shape[0])
        self.factors = torch.full(shape, ridge.others, dtype=torch.float64)
        (self.factors.diagonal() if len(shape) == 2 else self.factors).fill_(ridge.diagonal)
        self.offset_factor = ridge.offsets

    def __call__(self, coordinates: Array) -> tuple[float, Array]:
        """Return the objective and its gradient."""
        weight, offsets = self._split(coordinates)

        def work(rows: slice) -> tuple[float, Tensor, Tensor]:
            read, labels = self.read[rows], self.labels[rows]
            log_p = self._map(read, weight, offsets).log_softmax(dim=1)
            own = log_p.gather(1, labels[:, None])
            loss = -float((own if self.weights is None else own[:, 0] * self.weights[rows]).sum())
            slopes = log_p.exp_()
            slopes[torch.arange(len(labels)), labels] -= 1.0
            if self.weights is not None:
                slopes *= self.weights[rows, None]
            by_weight = slopes.T @ read if weight.ndim == 2 else (slopes * read).sum(dim=0)
            return loss, by_weight, slopes.sum(dim=0)

        parts = over_rows(work, len(self.labels), worth=self.read.numel() > SMALL)
        losses, by_weights, by_offsets = zip(*parts, strict=True)
        change, count = weight - self.anchor, len(self.labels)
        penalty = (self.factors * change.square()).sum() + self.offset_factor * offsets.square().sum()
        by_weight = sum(by_weights) / count + 2.0 * self.factors * change
        by_offset = sum(by_offsets) / count + 2.0 * self.offset_factor * offsets
        gradient = torch.cat([by_weight.flatten(), by_offset])
        return sum(losses) / count + float(penalty), gradient.numpy()

    def mean_nll(self, coordinates: Array) -> float:
        """Mean NLL without the penalty."""
        mapped = self._map(self.read, *self._split(coordinates))
        if self.weights is None:
            return float(torch.nn.functional.cross_entropy(mapped, self.labels))
        losses = torch.nn.functional.cross_entropy(mapped, self.labels, reduction="none")
        return float((losses * self.weights).mean())

    def _split(self, coordinates: Array) -> tuple[Tensor, Tensor]:
        flat = torch.from_numpy(coordinates)
        size = self.shape.numel()
        return flat[:size].reshape(self.shape), flat[size:]

    @staticmethod
    def _map(read: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        return (read @ weight.T if weight.ndim == 2 else read * weight) + offsets
