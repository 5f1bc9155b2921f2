"""The objective of `vector`, `sms`, `matrix` and `dirichlet`: softmax regression with a ridge penalty.

Arrays hold one sample per column, so that every operation runs over long rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from boxcal.calibrators.threads import SMALL, blocks, over_rows

if TYPE_CHECKING:
    from boxcal.calibrators.logit_maps.linear import Ridge

Array = np.ndarray[Any, Any]


class LinearPart:
    """W and w' at flat coordinates, and their ridge penalty.

    Parameters
    ----------
    shape : sequence of int
        (K, K), or (K,) for a diagonal W.
    ridge : Ridge
    """

    def __init__(self, shape: tuple[int, ...], ridge: Ridge) -> None:
        self.shape, self.offset_factor = shape, ridge.offsets
        self.diagonal = len(shape) == 1
        self.anchor, self.factors = np.ones(shape), np.full(shape, ridge.diagonal)
        if not self.diagonal:
            self.anchor, self.factors = np.eye(shape[0]), np.full(shape, ridge.others)
            np.fill_diagonal(self.factors, ridge.diagonal)

    def split(self, coordinates: Array) -> tuple[Array, Array]:
        """Give W and w'."""
        size = self.factors.size
        return coordinates[:size].reshape(self.shape), coordinates[size:]

    def mapped(self, weight: Array, offsets: Array, read: Array) -> Array:
        """Give `W x + w'` (K, N)."""
        result: Array = weight[:, None] * read if self.diagonal else weight @ read
        result += offsets[:, None]
        return result

    def backward(self, slopes: Array, read: Array) -> tuple[Array, Array]:
        """Give the derivatives in W and w' for those (K, N) in `W x + w'`."""
        by_weight = np.einsum("kn,kn->k", slopes, read) if self.diagonal else slopes @ read.T
        return by_weight, slopes.sum(axis=1)

    def penalised(
        self, coordinates: Array, loss: float, by_weight: Array, by_offsets: Array
    ) -> tuple[float, Array]:
        """Add the penalty to a loss, and its gradient to the loss's."""
        weight, offsets = self.split(coordinates)
        pull = self.factors * (weight - self.anchor)
        penalty = np.vdot(pull, weight - self.anchor) + self.offset_factor * np.vdot(offsets, offsets)
        gradient = [(by_weight + 2.0 * pull).ravel(), by_offsets + 2.0 * self.offset_factor * offsets]
        return loss + float(penalty), np.concatenate(gradient)


class LinearLoss:
    """Mean NLL of `softmax(W x + w')` plus the penalty, and its gradient, over the flat (W, w').

    Parameters
    ----------
    read : ndarray
        x, (K, N) float64.
    labels : ndarray
        (N,) int64.
    part : LinearPart
    weights : Tensor, optional
        (N,) float64, of mean 1.
    """

    def __init__(self, read: Array, labels: Array, part: LinearPart, weights: Tensor | None = None) -> None:
        self.read, self.labels, self.part = read, labels, part
        self.weights = None if weights is None else weights.numpy()

    def __call__(self, coordinates: Array) -> tuple[float, Array]:
        """Return the objective and its gradient."""
        weight, offsets = self.part.split(coordinates)

        def work(rows: slice) -> tuple[float, Array, Array]:
            loss, by_weight, by_offsets = 0.0, np.zeros_like(weight), np.zeros_like(offsets)
            for few in blocks(rows, len(offsets)):
                losses, slopes = self._softmax(weight, offsets, few)
                slopes[self.labels[few], np.arange(len(losses))] -= 1.0
                if self.weights is not None:
                    losses *= self.weights[few]
                    slopes *= self.weights[few]
                own = self.part.backward(slopes, self.read[:, few])
                loss += float(losses.sum())
                by_weight += own[0]
                by_offsets += own[1]
            return loss, by_weight, by_offsets

        count = len(self.labels)
        parts = over_rows(work, count, worth=self.read.size > SMALL)
        loss, by_weight, by_offsets = (sum(one) / count for one in zip(*parts, strict=True))
        return self.part.penalised(coordinates, loss, by_weight, by_offsets)

    def mean_nll(self, coordinates: Array) -> float:
        """Mean NLL without the penalty."""
        parts = blocks(slice(0, len(self.labels)), len(self.read))
        losses = np.concatenate([self._softmax(*self.part.split(coordinates), few)[0] for few in parts])
        return float((losses if self.weights is None else losses * self.weights).mean())

    def _softmax(self, weight: Array, offsets: Array, few: slice) -> tuple[Array, Array]:
        """Losses (n,) and probabilities (K, n) of some rows."""
        mapped = self.part.mapped(weight, offsets, self.read[:, few])
        mapped -= mapped.max(axis=0)
        own = mapped[self.labels[few], np.arange(mapped.shape[1])]
        np.exp(mapped, out=mapped)
        total = mapped.sum(axis=0)
        mapped /= total
        return np.log(total) - own, mapped
