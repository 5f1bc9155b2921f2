"""The networks: a given ResNet-20, a small one that is trained here within minutes, and `digits`.

Each has validation and test inputs, and a linear last layer, so its features and gradients are at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from boxcal.models.backends.digits import load_digits
from boxcal.models.digits_data import load_digits_split

MEAN = np.array([0.485, 0.456, 0.406], np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], np.float32)
TRAINED_ON, EPOCHS, BATCH = 20_000, 12, 128
"""The small network is trained on so many images without augmentation, and ends overconfident."""


@dataclass(frozen=True, eq=False)
class Network:
    """A network and its data.

    Attributes
    ----------
    title : str
    features : callable
        Inputs to what the last layer reads (N, D).
    logits : callable
        Inputs to logits (N, K), differentiable.
    head : tuple of Tensor
        Weight (K, D) and bias (K,).
    validation, test : tuple of Tensor
        Inputs and labels.
    shifted : int
        Rows that `nc` is fitted to, which runs the network hundreds of times.
    """

    title: str
    features: Callable[[Tensor], Tensor]
    logits: Callable[[Tensor], Tensor]
    head: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    shifted: int

    @cached_property
    def read(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The features of both sets, and their logits: (validation, test) of each."""
        features = [self.run(self.features, inputs) for inputs, _ in (self.validation, self.test)]
        weight, bias = (part.double() for part in self.head)
        logits = [part @ weight.T + bias for part in features]
        return {"features": (features[0], features[1]), "logits": (logits[0], logits[1])}

    @torch.no_grad()
    def run(self, function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """Apply `features` or `logits` to many inputs, in batches."""
        return torch.cat([function(batch) for batch in torch.split(inputs, 250)]).double()


class OnnxNetwork(nn.Module):
    """The layers of an ONNX file, for the few operators of a residual network, up to its last layer."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        graph = onnx.load(path).graph
        self.values = {
            one.name: torch.from_numpy(numpy_helper.to_array(one).copy()) for one in graph.initializer
        }
        *self.nodes, last = graph.node
        self.first, self.last = graph.input[0].name, last.input[0]
        weight, bias = (self.values[name] for name in last.input[1:])
        transposed = any(one.name == "transB" and one.i for one in last.attribute)
        self.head = weight if transposed else weight.T, bias

    def forward(self, inputs: Tensor) -> Tensor:
        """Give the features."""
        known = {**self.values, self.first: inputs}
        for node in self.nodes:
            options = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
            given = [known[name] for name in node.input if name]
            known[node.output[0]] = _OPERATORS[node.op_type](options, *given)
        return known[self.last]


def _convolution(options: dict[str, Any], x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.conv2d(x, weight, bias, stride=options["strides"], padding=options["pads"][:2])


def _slice(_options: dict[str, Any], x: Tensor, *given: Tensor) -> Tensor:
    starts, ends, axes, steps = (one.tolist() for one in given)
    parts = [slice(None)] * x.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        parts[axis] = slice(start, end, step)
    return x[tuple(parts)]


def _pad(_options: dict[str, Any], x: Tensor, pads: Tensor, *_: Tensor) -> Tensor:
    widths = pads.tolist()
    pairs = zip(widths[: x.ndim], widths[x.ndim :], strict=True)
    return functional.pad(x, [width for pair in reversed(list(pairs)) for width in pair])


_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "Conv": _convolution,
    "Slice": _slice,
    "Pad": _pad,
    "Relu": lambda _options, x: x.relu(),
    "Add": lambda _options, x, y: x + y,
    "GlobalAveragePool": lambda _options, x: x.mean(dim=(2, 3), keepdim=True),
    "Flatten": lambda _options, x: x.flatten(1),
}


def read_images(folder: Path, most: int | None = None) -> tuple[Tensor, Tensor]:
    """Read a folder per class, as (N, 3, 32, 32), in random order, and the labels."""
    classes = sorted(one for one in folder.iterdir() if one.is_dir())
    files = [(path, label) for label, one in enumerate(classes) for path in sorted(one.iterdir())]
    order = np.random.default_rng(0).permutation(len(files))[:most]
    pixels = np.empty((len(order), 32, 32, 3), np.uint8)
    for row, index in enumerate(order):
        with Image.open(files[index][0]) as image:
            pixels[row] = np.asarray(image.convert("RGB"))
    scaled = (pixels.astype(np.float32) / 255.0 - MEAN) / DEVIATION
    labels = torch.tensor([files[index][1] for index in order])
    return torch.from_numpy(np.ascontiguousarray(scaled.transpose(0, 3, 1, 2))), labels


def opened(name: str, body: nn.Module, head: tuple[Tensor, Tensor], images: Path, shifted: int) -> Network:
    """Put a body and its last layer together; half of the test images are for validation."""
    weight, bias = head
    title = f"CIFAR-10 as JPEG, {name}"
    inputs, labels = read_images(images / "test")
    middle = len(labels) // 2
    validation, test = (inputs[:middle], labels[:middle]), (inputs[middle:], labels[middle:])
    return Network(title, body, lambda x: body(x) @ weight.T + bias, head, validation, test, shifted)


def residual(images: Path, model: Path) -> Network:
    """Open the ResNet-20."""
    network = OnnxNetwork(model)
    return opened("ResNet-20", network, network.head, images, 500)


def small(images: Path, stored: Path) -> Network:
    """Train a network of three convolutions, or read its stored weights."""
    torch.manual_seed(0)
    body = nn.Sequential()
    for width_in, width_out, stride in ((3, 16, 1), (16, 32, 2), (32, 64, 2)):
        body.extend([nn.Conv2d(width_in, width_out, 3, stride, 1), nn.BatchNorm2d(width_out), nn.ReLU()])
    body.extend([nn.AvgPool2d(2), nn.Flatten()])
    last = nn.Linear(64 * 16, 10)
    network = nn.Sequential(body, last)
    if not stored.exists():
        train(network, *read_images(images / "train", TRAINED_ON))
        np.savez(stored, **{name: value.numpy() for name, value in network.state_dict().items()})
    with np.load(stored) as arrays:
        network.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays})
    network.eval().requires_grad_(requires_grad=False)
    return opened("three convolutions", body, (last.weight, last.bias), images, 1000)


def train(network: nn.Module, inputs: Tensor, labels: Tensor) -> None:
    """Minimise the cross-entropy by Adam."""
    optimiser = torch.optim.Adam(network.parameters(), lr=2e-3)
    for epoch in range(EPOCHS):
        total = 0.0
        for index in torch.split(torch.randperm(len(labels)), BATCH):
            loss = functional.cross_entropy(network(inputs[index]), labels[index])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
            total += loss.item() * len(index)
        print(f"training, epoch {epoch + 1} of {EPOCHS}: loss {total / len(labels):.3f}", flush=True)


def digits() -> Network:
    """Open the network that is part of the package."""
    network, split = load_digits(labels=None, device="cpu", precision="float32"), load_digits_split()
    validation, test = (
        (torch.from_numpy(one.levels), torch.from_numpy(one.labels)) for one in (split.validation, split.test)
    )
    if network.head is None:
        raise TypeError("the network has no linear last layer")
    title, shifted = "Digits, two-layer transformer", len(split.validation)
    return Network(title, network.features, network.differentiable, network.head, validation, test, shifted)
