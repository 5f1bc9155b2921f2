"""Instance-dependent methods beside the paper's recipe, with its starts and the scaling of its inputs varied.

    python -m benchmarks.recipe FOLDER... [--methods pb-mlp,pts] [--seeds 3]

A folder holds `val.npz` and `test.npz` with `logits` (N, K) or `probabilities`, and `labels`. The recipe is
Adam with a learning rate of 1e-3, 500 epochs in batches of 256, and networks of two hidden layers of five
ReLU units over the ten largest logits. All variants of a set are trained side by side, each as it would be
alone. The time of one is extrapolated from 200 of its steps.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.optima import read
from boxcal.calibrators import evaluate, fit
from boxcal.calibrators.fitting.loops import tempered_in_box
from boxcal.calibrators.operator.uniform import SortedRows
from boxcal.calibrators.threads import SMALL, one_library_thread, over_rows

METHODS = "pb-mlp,ts+pb-mlp,pts,pts+pb-mlp"
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

    def __call__(self, x: Tensor) -> list[Tensor]:
        """Give 1 / temperature, lower and upper bound of every row, each (R, n)."""
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
        """Give losses and derivatives (n, 4) of some rows."""
        answer = np.empty((len(index), 4))
        values = [np.ascontiguousarray(part.detach().reshape(-1).numpy()) for part in outputs]

        def work(rows: slice) -> None:
            at = index[rows]
            given = [self.sorted.scores[at], self.sorted.label_scores[at], *(value[rows] for value in values)]
            arrays = [*given, self.cuts[at], answer[rows]]
            tempered_in_box(*arrays)

        over_rows(work, len(index), worth=len(index) * self.sorted.num_classes > SMALL)
        return answer


def train(recipe: Recipe, logits: Tensor, labels: Tensor, most: float = math.inf) -> float:
    """Train by Adam; return the seconds of a step."""
    inputs, rows = recipe.inputs(logits), Rows(logits, labels)
    optimiser = torch.optim.Adam(recipe.parameters)
    rngs = [np.random.default_rng(seed) for _, _, seed in recipe.runs]
    steps, began = 0, time.perf_counter()
    for _ in range(EPOCHS):
        orders = np.stack([rng.permutation(len(labels)) for rng in rngs])
        for begin in range(0, len(labels), BATCH):
            index = orders[:, begin : begin + BATCH]
            columns = torch.from_numpy(index)[..., None].expand(-1, -1, inputs.shape[2])
            outputs = recipe(inputs.gather(1, columns))
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
                return (time.perf_counter() - began) / steps
    return (time.perf_counter() - began) / steps


def nll(recipe: Recipe, logits: Tensor, labels: Tensor) -> NDArray[np.float64]:
    """Give the mean loss of every run (R,)."""
    rows, every = Rows(logits, labels), np.arange(len(labels))
    with torch.no_grad():
        outputs = recipe(recipe.inputs(logits))
    losses = [rows.losses(every, [out[run] for out in outputs])[:, 0] for run in range(len(recipe.runs))]
    return np.array([values.mean() for values in losses])


def best_variant(
    method: str, val: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], seeds: int
) -> tuple[str, NDArray[np.float64], float]:
    """Run all variants; give the name and the test NLLs of the best, and the seconds of one run."""
    variants = list(itertools.product(STARTS, INPUTS))
    runs = [(start, scaling, seed) for start, scaling in variants for seed in range(seeds)]
    with one_library_thread():
        recipe = Recipe(method, runs, val[0])
        train(recipe, *val)
        reached = nll(recipe, *test).reshape(len(variants), seeds)
        step = train(Recipe(method, runs[:1], val[0]), *val, most=TIMED_STEPS)
    best = int(reached.mean(axis=1).argmin())
    steps = EPOCHS * math.ceil(len(val[1]) / BATCH)
    return ", ".join(variants[best]), reached[best], step * steps


def main() -> None:
    """Print one line per set and method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(
        "| set | method | the recipe's best: start, inputs | test NLL (SE) | boxcal | time, s | boxcal, s |"
    )
    print("|---|---|---|---|---|---|---|")
    for folder in options.folders:
        val, test = read(folder / "val.npz"), read(folder / "test.npz")
        for method in options.methods.split(","):
            variant, theirs, seconds = best_variant(method, val, test, options.seeds)
            fits = [fit(method, *val, seed=seed) for seed in range(options.seeds)]
            ours = np.mean([evaluate(one.calibrator(test[0]).numpy(), test[1].numpy()).nll for one in fits])
            error = theirs.std(ddof=1) / math.sqrt(len(theirs))
            print(
                f"| {folder.name} | `{method}` | {variant} | {theirs.mean():.4f} ({error:.4f}) | {ours:.4f} "
                f"| {seconds:.1f} | {min(one.seconds for one in fits):.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
