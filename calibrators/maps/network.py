"""The small network that instance-dependent temperatures and bounds come from (Tomani et al. 2022).

Two hidden layers of tanh units over the ten largest logits of a row, in float64. It reads -log(1 + surprisal)
of these ten, where their surprisal is their log-softmax with its sign changed: among rows whose largest
logits are close, what it answers must change quickly, and far from there slowly. Or it reads these ten less
the mean of all logits of the row: their log-softmax does not tell how far they are above the others. What it
reads is divided by its root mean square on the validation set, or standardised entry by entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, ClassVar, Self

import numpy as np

from boxcal.calibrators import array_ops
from boxcal.calibrators.maps.parameters import (
    HIDDEN,
    TOP,
    Array,
    Gradients,
    Map,
    Parameters,
    Size,
    Values,
    Vjp,
)

CENTRED, LOG_SURPRISAL = 2.0, 3.0
"""What a network reads of the largest logits: these less the mean of all of the row, or -log(1 + surprisal).
"""
FLAT = 1e-3
DRAWS = 5
"""How many networks a fit descends with, each from random hidden layers of its own."""
NARROWEST = 1e-12
"""Spread of an entry that is the same in all rows."""
LAYERS = ("weight_1", "bias_1", "weight_2", "bias_2", "weight_3", "bias_3")
HIDDEN_LAYERS = LAYERS[:4]
PREFIX = "network."


def network_shapes(outputs: int) -> dict[str, tuple[Size, ...]]:
    """Name the tensors of a network with their shapes."""
    shapes: dict[str, tuple[Size, ...]] = {
        "centre": ("T",), "spread": ("T",), "normalised": (), "weight_1": ("H", "T"), "bias_1": ("H",),
        "weight_2": ("H", "H"), "bias_2": ("H",), "weight_3": (outputs, "H"), "bias_3": (outputs,),
    }  # fmt: skip
    return {PREFIX + name: shape for name, shape in shapes.items()}


def fresh_network(num_classes: int, outputs: Sequence[float]) -> dict[str, Any]:
    """Give the tensors of a network that answers `outputs` for any row."""
    inputs = min(TOP, num_classes)
    tensors: dict[str, Any] = {
        "centre": np.zeros(inputs), "spread": np.ones(inputs), "normalised": LOG_SURPRISAL,
        "weight_1": np.zeros((HIDDEN, inputs)), "bias_1": np.zeros(HIDDEN),
        "weight_2": np.zeros((HIDDEN, HIDDEN)), "bias_2": np.zeros(HIDDEN),
        "weight_3": np.zeros((len(outputs), HIDDEN)), "bias_3": np.array(outputs),
    }  # fmt: skip
    return {PREFIX + name: value for name, value in tensors.items()}


def network_reads(ops: ModuleType, p: Parameters, logits: Values) -> Values:
    """Give what a network reads of (N, K) logits, before it is standardised."""
    top = ops.largest(logits, len(p["network.centre"]))
    if p["network.normalised"] == CENTRED:
        return top - ops.mean(logits)
    return -ops.log(1.0 - ops.log_softmax(top))


def hidden_layers(ops: ModuleType, p: Parameters, logits: Values) -> tuple[Values, Values]:
    """Give both hidden layers of a network, each (N, H)."""
    inputs = (network_reads(ops, p, logits) - p["network.centre"]) / p["network.spread"]
    first = ops.tanh(inputs @ p["network.weight_1"].T + p["network.bias_1"])
    return first, ops.tanh(first @ p["network.weight_2"].T + p["network.bias_2"])


def network_outputs(ops: ModuleType, p: Parameters, logits: Values) -> Values:
    """Map (N, K) logits to (N, outputs) numbers."""
    return hidden_layers(ops, p, logits)[1] @ p["network.weight_3"].T + p["network.bias_3"]


def forward(p: Parameters, inputs: Array) -> tuple[Array, Vjp]:
    """Give the outputs (outputs, N) for standardised inputs (T, N), one sample per column, and the way back.

    `back(by_outputs)` gives the derivatives in the layers by name, and in the inputs.
    """
    weights = [p[PREFIX + name] for name in LAYERS[::2]]
    biases = [p[PREFIX + name] for name in LAYERS[1::2]]
    layers = [inputs]
    for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
        layer = weight @ layers[-1]
        layer += bias[:, None]
        layers.append(np.tanh(layer, out=layer))
    outputs = weights[-1] @ layers[-1] + biases[-1][:, None]

    def back(by_outputs: Array) -> tuple[Gradients, Array]:
        # d tanh = 1 - tanh^2, layer by layer from the outputs to the inputs.
        gradients: Gradients = {}
        slopes = by_outputs
        for depth in reversed(range(len(weights))):
            units = layers[depth]
            gradients[f"{PREFIX}weight_{depth + 1}"] = slopes @ units.T
            gradients[f"{PREFIX}bias_{depth + 1}"] = slopes.sum(axis=1)
            slopes = weights[depth].T @ slopes
            if depth:
                slopes *= 1.0 - units * units
        return gradients, slopes

    return outputs, back


def _log_softmax(columns: Array) -> Array:
    """Give the log-softmax (T, N) of the T largest logits of each row, the largest first."""
    logs: Array = columns - columns[0]
    logs -= np.log(np.exp(logs).sum(axis=0))
    return logs


class NetworkMap(Map):
    """A map whose searched parameters are those of a network."""

    is_network = True
    prepared = ("temperature", "network.centre", "network.spread", "network.normalised")
    outputs: ClassVar[tuple[float, ...]]
    """What a fresh network answers."""

    def invalid_reason(self) -> str | None:
        """Say so if a tensor is not positive, or this version does not know what the network reads."""
        reading = self.parameters["network.normalised"].item()
        known = (CENTRED, LOG_SURPRISAL)
        unknown = f"network.normalised is {reading}; this version knows {known}"
        return super().invalid_reason() or (None if reading in known else unknown)

    def prepare_network(self, logits: Array, kind: float = LOG_SURPRISAL, *, by_entry: bool = False) -> None:
        """Choose what it will read, and learn the size of that, entry by entry or of all together."""
        size = len(self.parameters["network.centre"])
        own = self.parameters | {"network.normalised": np.array(kind), "network.centre": np.zeros(size)}
        read = network_reads(array_ops, own, logits)
        if by_entry:
            own["network.centre"] = read.mean(axis=0)
            own["network.spread"] = np.maximum(read.std(axis=0), NARROWEST)
        else:
            own["network.spread"] = np.full(size, np.sqrt(np.square(read).mean()))
        self.parameters = own

    def adopt_network(self, other: Map) -> None:
        """Read what another network reads."""
        self.parameters = self.parameters | {
            PREFIX + name: other.parameters[PREFIX + name] for name in ("centre", "spread", "normalised")
        }

    def variants(self, logits: Array) -> list[Self]:
        """Give a map for each choice of what its network may read of (N, K) logits, its own first."""
        kinds = [(LOG_SURPRISAL, True)] + [(CENTRED, False)] * (self.num_classes > TOP)
        others = [self.moved(self.coordinates()) for _ in kinds]
        for other, (kind, by_entry) in zip(others, kinds, strict=True):
            other.prepare_network(logits, kind, by_entry=by_entry)
        return [self, *others]

    def reading(self, columns: Array) -> Array:
        """Give the inputs (T, N) for the largest logits of each row less the mean of all."""
        is_centred = self.parameters["network.normalised"] == CENTRED
        read = columns if is_centred else -np.log(1.0 - _log_softmax(columns))
        centre, spread = (self.parameters[PREFIX + name][:, None] for name in ("centre", "spread"))
        standard: Array = (read - centre) / spread
        return standard

    def reading_back(self, columns: Array, by_reading: Array) -> Array:
        """Give derivatives in the columns: with s the log-softmax, d(-log(1 - s)) = ds / (1 - s)."""
        by_read: Array = by_reading / self.parameters["network.spread"][:, None]
        if self.parameters["network.normalised"] == CENTRED:
            return by_read
        logs = _log_softmax(columns)
        by_read = by_read / (1.0 - logs)
        by_columns: Array = by_read - np.exp(logs) * by_read.sum(axis=0)
        return by_columns

    def saturation(self, logits: Array) -> float:
        """Share of the hidden units whose slope is below FLAT, over all rows."""
        slopes = [1.0 - layer * layer for layer in hidden_layers(array_ops, self.parameters, logits)]
        return float((np.stack(slopes) < FLAT).mean())

    def started(self, outputs: Sequence[float], seed: int) -> Array:
        """Coordinates of a network that answers `outputs` everywhere, with random hidden layers."""
        rng, pieces = np.random.default_rng(seed), []
        for name, own in self.searched.items():
            piece = rng.normal(size=own.shape) / own.shape[-1] ** 0.5
            if name.endswith("weight_3"):
                piece = np.zeros(own.shape)
            if name.endswith("bias_3"):
                piece = np.array(outputs)
            pieces.append(piece.ravel())
        return np.concatenate(pieces)

    def averaged(self, members: Sequence[Array]) -> Self:
        """Give a map whose network answers the mean of networks at several coordinates, side by side."""
        each = [self.at(member) for member in members]

        def all_of(name: str) -> list[Array]:
            return [np.array(one[PREFIX + name]) for one in each]

        hidden = len(each[0]["network.bias_1"])
        square = np.zeros((len(each) * hidden, len(each) * hidden))
        for place, block in enumerate(all_of("weight_2")):
            units = slice(place * hidden, (place + 1) * hidden)
            square[units, units] = block
        layers = {name: np.concatenate(all_of(name)) for name in ("weight_1", "bias_1", "bias_2")}
        layers |= {"weight_2": square, "weight_3": np.concatenate(all_of("weight_3"), axis=1) / len(each)}
        layers["bias_3"] = np.mean(all_of("bias_3"), axis=0)
        tensors = {name: layers.get(name.removeprefix(PREFIX), own) for name, own in self.parameters.items()}
        return type(self)(self.num_classes, tensors)

    def with_network(self, coordinates: Array) -> Self:
        """Give a map that reads the same, with one network of a fit in the place of the mean of several."""
        one = type(self)(self.num_classes)
        one.parameters |= {name: own for name, own in self.parameters.items() if name in self.prepared}
        return one.moved(coordinates)

    def fixed_between(self, plain: Array) -> Array:
        """Keep the hidden layers, and all of a network whose answers at `plain` differ from row to row."""
        own, fixed = self.at(plain), []
        varies = bool(np.any(own["network.weight_3"]))
        for name, value in self.searched.items():
            fixed.append(np.full(value.size, varies or name.removeprefix(PREFIX) in HIDDEN_LAYERS))
        return np.concatenate(fixed)
