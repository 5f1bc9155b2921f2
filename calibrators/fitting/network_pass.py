"""The network of `pts` and `pb-mlp` in NumPy, forward and backward, for `closed_form_gradients`.

Arrays hold one sample per column, so that every operation runs over long rows. By autograd it takes several
times as long, most of it between operations.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from boxcal.calibrators.formulas import CENTRED
from boxcal.calibrators.network import TopLogitsNetwork

Array = np.ndarray[Any, Any]


def logistic(outputs: Array) -> Array:
    """Give 1 / (1 + exp(-outputs)), to full relative precision."""
    small = np.exp(-np.abs(outputs))
    result: Array = np.where(outputs >= 0.0, 1.0, small) / (1.0 + small)
    return result


class NetworkPass:
    """A network that reads the log-softmax or centred logits; `backward` follows `forward`."""

    def __init__(self, network: TopLogitsNetwork) -> None:
        self.shapes = [tuple(own.shape) for own in network.parameters()]
        self.centre, self.spread = network.centre.numpy()[:, None], network.spread.numpy()[:, None]
        self.centred = float(network.normalised) == CENTRED
        self.weights: list[Array] = []
        self.layers: list[Array] = []

    def read(self, top: Array) -> Array:
        """Give its inputs (T, N) for the ten largest logits of each row less the mean of all."""
        if not self.centred:
            top = top - top[0]
            top -= np.log(np.exp(top).sum(axis=0))
        read: Array = (top - self.centre) / self.spread
        return read

    def read_backward(self, by_inputs: Array, inputs: Array) -> Array:
        """Give the derivatives in these logits for those in the inputs."""
        by_logarithms: Array = by_inputs / self.spread
        if self.centred:
            return by_logarithms
        by_logarithms -= np.exp(inputs * self.spread + self.centre) * by_logarithms.sum(axis=0)
        return by_logarithms

    def forward(self, coordinates: Array, inputs: Array) -> Array:
        """Give the outputs, one row each (outputs, N)."""
        edges = [0, *itertools.accumulate(math.prod(shape) for shape in self.shapes)]
        pieces = [
            coordinates[begin:end].reshape(shape)
            for (begin, end), shape in zip(itertools.pairwise(edges), self.shapes, strict=True)
        ]
        self.weights, self.layers = pieces[::2], [inputs]
        for weight, bias in zip(pieces[:-2:2], pieces[1:-2:2], strict=True):
            self.layers.append(np.tanh(weight @ self.layers[-1] + bias[:, None]))
        outputs: Array = pieces[-2] @ self.layers[-1] + pieces[-1][:, None]
        return outputs

    def backward(self, by_outputs: Array) -> tuple[Array, Array]:
        """Give the derivatives in the coordinates and in the inputs, for those in the outputs."""
        pieces: list[Array] = []
        slopes = by_outputs
        for depth in reversed(range(len(self.weights))):
            units = self.layers[depth]
            pieces = [(slopes @ units.T).ravel(), slopes.sum(axis=1), *pieces]
            slopes = self.weights[depth].T @ slopes
            if depth:
                slopes *= 1.0 - units * units
        return np.concatenate(pieces), slopes
