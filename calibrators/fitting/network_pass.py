"""The network of `pts` and `pb-mlp` in NumPy, forward and backward, for `closed_form_gradients`.

Arrays hold one sample per column, so that every operation runs over long rows. By autograd it takes several
times as long, most of it between operations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from boxcal.calibrators.formulas import CENTRED
from boxcal.calibrators.network import TopLogitsNetwork

Array = np.ndarray[Any, Any]
Back = Callable[..., Any]
"""From derivatives in what a part of a method gives to those in its coordinates."""


def logistic(outputs: Array) -> Array:
    """Give 1 / (1 + exp(-outputs)), to full relative precision."""
    small = np.exp(-np.abs(outputs))
    result: Array = np.where(outputs >= 0.0, 1.0, small) / (1.0 + small)
    return result


class NetworkPass:
    """A network that reads the logarithm of the surprisal or centred logits.

    Parameters
    ----------
    network : TopLogitsNetwork
    precision : numpy floating type
        Of its layers. float32 takes half the time, and keeps seven digits.
    """

    def __init__(self, network: TopLogitsNetwork, precision: type[np.floating[Any]] = np.float64) -> None:
        self.precision = precision
        self.shapes = [tuple(own.shape) for own in network.parameters()]
        self.edges = [0, *itertools.accumulate(math.prod(shape) for shape in self.shapes)]
        self.centre, self.spread = (
            buffer.numpy()[:, None].astype(precision) for buffer in (network.centre, network.spread)
        )
        self.centred = float(network.normalised) == CENTRED

    def read(self, top: Array) -> Array:
        """Give its inputs (T, N) for the ten largest logits of each row less the mean of all."""
        if not self.centred:
            top = (top - top[0]).astype(self.precision, copy=False)
            top -= np.log(np.exp(top).sum(axis=0))
            top = -np.log(1.0 - top)
        read: Array = (top.astype(self.precision, copy=False) - self.centre) / self.spread
        return read

    def read_backward(self, by_inputs: Array, inputs: Array) -> Array:
        """Give the derivatives in these logits for those in the inputs."""
        by_logarithms: Array = by_inputs / self.spread
        if self.centred:
            return by_logarithms
        beyond = np.exp(-(inputs * self.spread + self.centre))  # 1 + surprisal
        by_logarithms /= beyond
        by_logarithms -= np.exp(1.0 - beyond) * by_logarithms.sum(axis=0)
        return by_logarithms

    def forward(self, coordinates: Array, inputs: Array) -> tuple[Array, Back]:
        """Give the outputs (outputs, N) in float64, and the way back from derivatives in them.

        The way back gives the derivatives in the coordinates, in float64, and in the inputs.
        """
        own = coordinates.astype(self.precision, copy=False)
        pieces = [
            own[begin:end].reshape(shape)
            for (begin, end), shape in zip(itertools.pairwise(self.edges), self.shapes, strict=True)
        ]
        weights, biases, layers = pieces[::2], pieces[1::2], [inputs]
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            layer = weight @ layers[-1]
            layer += bias[:, None]
            layers.append(np.tanh(layer, out=layer))
        outputs = weights[-1] @ layers[-1] + biases[-1][:, None]

        def back(by_outputs: Array) -> tuple[Array, Array]:
            parts: list[Array] = []
            slopes = by_outputs.astype(self.precision, copy=False)
            for depth in reversed(range(len(weights))):
                units = layers[depth]
                parts = [(slopes @ units.T).ravel(), slopes.sum(axis=1), *parts]
                slopes = weights[depth].T @ slopes
                if depth:
                    slopes *= 1.0 - units * units
            return np.concatenate(parts).astype(np.float64, copy=False), slopes

        return outputs.astype(np.float64, copy=False), back
