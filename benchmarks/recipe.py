"""Instance-dependent methods beside the paper's recipe, with its starts and the scaling of its inputs varied.

    python -m benchmarks.recipe FOLDER... [--methods pb-mlp,pts] [--seeds 3]

A folder holds `val.npz` and `test.npz` with `logits` (N, K) or `probabilities`, and `labels`. The recipe is Adam with a
learning rate of 1e-3, 500 epochs in batches of 256, and networks of two hidden layers of five ReLU units over the ten
largest logits. All variants of a set are trained side by side, each as it would be alone; the seconds of one
are those of 200 of its own steps, extrapolated.
"""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from boxcal.calibrators.fitting.loops import tempered_in_box
from boxcal.calibrators.operator.uniform import SortedRows
from boxcal.calibrators.threads import over_rows

METHODS = "pb-mlp,ts+pb-mlp,pts+pb-mlp,dirichlet+pb-mlp,pts"
EPOCHS, BATCH, HIDDEN = 500, 256, 5
STARTS = ("torch's", "zero output", "open bounds")
"""Torch's own; the output layer at zero; that with the biases at the paper's constants, -3 and 3."""
INPUTS = ("raw", "standardised", "log-softmax")
TIMED_STEPS = 200


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
        """All weights and biases."""
        return [part for layer in self.layers for part in layer]


class Recipe:
    """The paper's model of one method over some runs (start, scaling of inputs, seed)."""

    def __init__(self, method: str, runs: list[tuple[str, str, int]], logits: Tensor) -> None:
        self.base, _, self.box = method.partition("+") if "+" in method else ("", "", method)
        if method == "pts":
            self.base, self.box = "pts", ""
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

    def inputs(self, logits: Tensor) -> Tensor:
        """What the networks of all runs read, (R, N, 10)."""
        top = logits.topk(min(10, self.num_classes), dim=1).values
        normalised = top - logits.logsumexp(dim=1, keepdim=True)
        return torch.stack(
            [
                normalised if scaling == "log-softmax" else (top - shift) / scale
                for (_, scaling, _), (shift, scale) in zip(self.runs, self.scaling, strict=True)
            ]
        )

    def __call__(self, x: Tensor) -> list[Tensor]:
        """1 / temperature, lower and upper bound of every row, each (R, n)."""
        runs, count, _ = x.shape
        inverse = torch.ones(runs, count, dtype=torch.float64)
        if self.base == "ts":
            inverse = (-self.log_temperature).exp().expand(runs, count)
        if self.base == "pts":
            inverse = (-self.temperatures(x)[..., 0]).exp()
        if not self.box:
            return [inverse, torch.zeros_like(inverse), torch.ones_like(inverse)]
        share = 1.0 / self.num_classes
        lower, upper = torch.sigmoid(self.bounds(x)).unbind(dim=-1)
        return [inverse, share * lower, share + (1.0 - share) * upper]


def _shift_and_scale(top: Tensor, scaling: str) -> tuple[Tensor | float, Tensor | float]:
    if scaling != "standardised":
        return 0.0, 1.0
    return top.mean(dim=0), top.std(dim=0)


class Rows:
    """Rows sorted once, and their losses under temperatures and bounds of their own."""

    def __init__(self, logits: Tensor, labels: Tensor) -> None:
        self.sorted = SortedRows(logits, labels)
        self.cuts = np.tile(np.array([0, self.sorted.num_classes], np.int32), (self.sorted.num_rows, 1))

    def losses(self, index: NDArray[np.int64], outputs: list[Tensor]) -> NDArray[np.float64]:
        """Losses and derivatives (n, 4) of some rows."""
        answer = np.empty((len(index), 4))
        values = [np.ascontiguousarray(part.detach().reshape(-1).numpy()) for part in outputs]

        def work(rows: slice) -> None:
            at = index[rows]
            tempered_in_box(
                self.sorted.scores[at],
                self.sorted.label_scores[at],
                *(value[rows] for value in values),
                self.cuts[at],
                answer[rows],
            )

        over_rows(work, len(index), worth=len(index) * self.sorted.num_classes > 20_000)
        return answer


def train(recipe: Recipe, logits: Tensor, labels: Tensor, epochs: int, most: float = math.inf) -> float:
    """Train by Adam; return the seconds of a step."""
    inputs, rows = recipe.inputs(logits), Rows(logits, labels)
    optimiser = torch.optim.Adam(recipe.parameters)
    rngs = [np.random.default_rng(seed) for _, _, seed in recipe.runs]
    steps, began = 0, time.perf_counter()
    for _ in range(epochs):
        orders = np.stack([rng.permutation(len(labels)) for rng in rngs])
        for begin in range(0, len(labels), BATCH):
            index = orders[:, begin : begin + BATCH]
            outputs = recipe(
                inputs.gather(1, torch.from_numpy(index)[..., None].expand(-1, -1, inputs.shape[2]))
            )
            answer = rows.losses(index.reshape(-1), outputs)
            pairs = [
                (out, torch.from_numpy(slope).reshape(out.shape) / index.shape[1])
                for out, slope in zip(outputs, answer.T[1:], strict=True)
                if out.requires_grad
            ]
            optimiser.zero_grad()
            torch.autograd.backward([out for out, _ in pairs], [slope for _, slope in pairs])
            optimiser.step()
            steps += 1
            if steps >= most:
                break
        if steps >= most:
            break
    return (time.perf_counter() - began) / steps


def nll(recipe: Recipe, logits: Tensor, labels: Tensor) -> NDArray[np.float64]:
    """Mean loss of every run (R,)."""
    rows = Rows(logits, labels)
    with torch.no_grad():
        outputs = recipe(recipe.inputs(logits))
    every = np.arange(len(labels))
    return np.array(
        [rows.losses(every, [out[run] for out in outputs])[:, 0].mean() for run in range(len(recipe.runs))]
    )
