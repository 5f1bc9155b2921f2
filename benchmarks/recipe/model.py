"""The paper's recipe for instance-dependent methods: its networks, many runs side by side."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

HIDDEN = 5
STARTS = ("torch's", "zero output", "open bounds")
"""Torch's own; the output layer at zero; that with the biases at the paper's constants, -3 and 3."""
INPUTS = ("raw", "standardised", "log-softmax")


class Networks:
    """R networks of 10-5-5-outputs ReLU units, one for each run, trained side by side."""

    def __init__(self, runs: list[tuple[str, str, int]], inputs: int, open_outputs: list[float]) -> None:
        sizes = [inputs, HIDDEN, HIDDEN, len(open_outputs)]
        layers: list[tuple[Tensor, Tensor]] = []
        for begin, end in itertools.pairwise(sizes):
            weights, biases = [], []
            for start, _, seed in runs:
                torch.manual_seed(1000 * seed + begin + 10 * end)
                layer = torch.nn.Linear(begin, end).double()
                last = len(layers) == 2
                weight, bias = layer.weight.detach().T, layer.bias.detach()[None]
                if last and start != STARTS[0]:
                    weight, bias = torch.zeros_like(weight), torch.zeros_like(bias)
                if last and start == STARTS[2]:
                    bias = torch.tensor([open_outputs], dtype=torch.float64)
                weights.append(weight)
                biases.append(bias)
            layers.append((torch.stack(weights).requires_grad_(), torch.stack(biases).requires_grad_()))
        self.layers = layers

    def __call__(self, x: Tensor) -> Tensor:
        """Map (R, n, inputs) to (R, n, outputs)."""
        for weight, bias in self.layers[:-1]:
            x = torch.relu(x @ weight + bias)
        weight, bias = self.layers[-1]
        return x @ weight + bias

    @property
    def parameters(self) -> list[Tensor]:
        return [part for layer in self.layers for part in layer]


class Recipe:
    """The paper's model of one method over some runs (start, scaling of inputs, seed)."""

    def __init__(
        self, method: str, runs: list[tuple[str, str, int]], logits: Tensor, strength: float = 0.0
    ) -> None:
        self.base = method.removesuffix("pb-mlp").removesuffix("+")
        self.box = method.endswith("pb-mlp")
        self.runs, count = runs, len(runs)
        K = logits.shape[1]
        width = min(10, K)
        self.num_classes = K
        top = logits.topk(width, dim=1).values
        self.scaling = [_shift_and_scale(top, scaling) for _, scaling, _ in runs]
        self.parameters: list[Tensor] = []
        if self.box:
            self.bounds = Networks(runs, width, [-3.0, 3.0])
            self.parameters += self.bounds.parameters
        if self.base == "pts":
            self.temperatures = Networks(runs, width, [0.0])
            self.parameters += self.temperatures.parameters
        if self.base == "ts":
            self.log_temperature = torch.zeros(count, 1, dtype=torch.float64, requires_grad=True)
            self.parameters.append(self.log_temperature)
        if self.base == "dirichlet":
            self.weight = torch.eye(K, dtype=torch.float64).repeat(count, 1, 1).requires_grad_()
            self.intercept = torch.zeros(count, 1, K, dtype=torch.float64, requires_grad=True)
            self.parameters += [self.weight, self.intercept]
            self.strength = strength / (K * (K - 1)), strength / K

    def inputs(self, logits: Tensor) -> Tensor:
        """Give what the networks of all runs read, (R, N, 10)."""
        top = logits.topk(min(10, self.num_classes), dim=1).values
        normalised = top - logits.logsumexp(dim=1, keepdim=True)
        return torch.stack(
            [
                normalised if scaling == "log-softmax" else (top - shift) / scale
                for (_, scaling, _), (shift, scale) in zip(self.runs, self.scaling, strict=True)
            ]
        )

    def __call__(self, x: Tensor, log_probabilities: Tensor | None = None) -> list[Tensor]:
        """Give 1 / temperature, or the mapped logits (R, n, K), and the bounds of every row, each (R, n)."""
        runs, count, _ = x.shape
        first = torch.ones(runs, count, dtype=torch.float64)
        if self.base == "ts":
            first = (-self.log_temperature).exp().expand(runs, count)
        if self.base == "pts":
            first = (-self.temperatures(x)[..., 0]).exp()
        if log_probabilities is not None:
            first = log_probabilities @ self.weight.transpose(1, 2) + self.intercept
        if not self.box:
            return [first, torch.zeros(runs, count, dtype=torch.float64), torch.ones_like(first)]
        share = 1.0 / self.num_classes
        lower, upper = torch.sigmoid(self.bounds(x)).unbind(dim=-1)
        return [first, share * lower, share + (1.0 - share) * upper]

    def penalty(self) -> Tensor:
        """Give the regularisation of all runs together."""
        if self.base != "dirichlet":
            return torch.zeros(())
        others = self.weight.square().sum() - self.weight.diagonal(dim1=1, dim2=2).square().sum()
        return self.strength[0] * others + self.strength[1] * self.intercept.square().sum()


def _shift_and_scale(top: Tensor, scaling: str) -> tuple[Tensor | float, Tensor | float]:
    if scaling != "standardised":
        return 0.0, 1.0
    return top.mean(dim=0), top.std(dim=0)
