"""Instance-dependent methods beside the paper's recipe, with its starts and the scaling of its inputs varied.

    python -m benchmarks.recipe FOLDER... [--methods pb-mlp,pts] [--seeds 3] [--only recipe|boxcal]

A folder holds `val.npz` and `test.npz` with `logits` (N, K) or `probabilities`, and `labels`. The recipe is
Adam with a learning rate of 1e-3, 500 epochs in batches of 256, and networks of two hidden layers of five
ReLU units over the ten largest logits. All variants of a set are trained side by side, each as it would be
alone. The processor time of one is extrapolated from 200 of its steps. The affine map of `dirichlet` starts
at the identity, and has the penalty that boxcal's cross-validation chooses. The losses of each method are
stored, and a run does only what is not stored.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.optima import read
from boxcal.calibrators import fit
from boxcal.calibrators.fitting.joint import dense_loss
from boxcal.calibrators.operator.uniform import SortedRows, solve_row
from boxcal.calibrators.threads import SMALL, one_library_thread, over_rows

METHODS = "pb-mlp,ts+pb-mlp,pts,pts+pb-mlp,dirichlet+pb-mlp"
STORE = Path(__file__).parent / "results" / "recipe.tmp"
EPOCHS, BATCH, HIDDEN = 500, 256, 5
STARTS = ("torch's", "zero output", "open bounds")
"""Torch's own; the output layer at zero; that with the biases at the paper's constants, -3 and 3."""
INPUTS = ("raw", "standardised", "log-softmax")
TIMED_STEPS = 200
SMALLER = 50
"""Classes above which `dirichlet` is run from one start only."""

Array = NDArray[np.float64]
Labelled = tuple[Tensor, Tensor]
"""Logits and labels."""


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


@njit(nogil=True, error_model="numpy")
def tempered_in_box(  # noqa: PLR0917 - compiled loops take arrays by position
    ascending: Array, own: Array, inverse: Array, lower: Array, upper: Array, cuts: Array, answer: Array
) -> None:
    """Fill answer (N, 4): each row's loss, and its derivatives in 1 / temperature and in both bounds.

    `ascending` (N, K) are rows of logits less their largest, `own` (N,) the label's entry of them; `inverse`,
    `lower`, `upper` (N,) are each row's 1 / temperature and bounds. `cuts` (N, 2) holds where each row met
    the bounds of the last call, and is brought up to date.
    """
    count, size = ascending.shape
    scaled, sums, moments = np.empty(size), np.empty(size), np.empty(size)
    for n in range(count):
        low, high, factor = lower[n], upper[n], inverse[n]
        log_low = math.log(low) if low > 0.0 else -math.inf
        log_high = math.log(high)
        before, total, moment = -math.inf, 0.0, 0.0
        for k in range(size):
            here = ascending[n, k] * factor
            step = math.exp(before - here)
            total = 1.0 + total * step
            moment = ascending[n, k] + moment * step
            scaled[k], sums[k], moments[k] = here, total, moment
            before = here
        score = own[n] * factor
        log_scale = -math.log(total)
        answer[n, 1], answer[n, 2], answer[n, 3] = 0.0, 0.0, 0.0
        if scaled[0] + log_scale >= log_low and log_scale <= log_high:
            answer[n, 0] = -score - log_scale
            answer[n, 1] = moment / total - own[n]
            continue
        log_scale, first, end, mass = solve_row(
            scaled, sums, low, high, log_low, log_high, cuts[n, 0], cuts[n, 1]
        )
        cuts[n, 0], cuts[n, 1] = first, end
        log_p = score + log_scale
        if first > 0 and log_p < log_low:
            answer[n, 0], answer[n, 2] = -log_low, -1.0 / low
        elif end < size and log_p > log_high:
            answer[n, 0], answer[n, 3] = -log_high, -1.0 / high
        else:
            answer[n, 0] = -log_p
            if mass > 0.0 and end > first:
                weight, moment = sums[end - 1], moments[end - 1]
                if first > 0:
                    step = math.exp(scaled[first - 1] - scaled[end - 1])
                    weight -= sums[first - 1] * step
                    moment -= moments[first - 1] * step
                answer[n, 1] = moment / weight - own[n]
                answer[n, 2] = first / mass
                answer[n, 3] = (size - end) / mass


class Rows:
    """Rows sorted once, and their losses under temperatures and bounds of their own."""

    def __init__(self, logits: Tensor, labels: Tensor, base: str) -> None:
        self.sorted, self.labels = SortedRows(logits, labels), labels.numpy()
        self.cuts = np.tile(np.array([0, self.sorted.num_classes], np.int32), (self.sorted.num_rows, 1))
        self.log_probabilities = logits.log_softmax(dim=1) if base == "dirichlet" else None

    def losses(self, index: NDArray[np.int64], outputs: list[Tensor]) -> tuple[Array, list[Array]]:
        """Give the losses of some rows, and their derivatives in each output."""
        if self.log_probabilities is not None:
            scores, *bounds = (part.detach().numpy() for part in outputs)
            flat = np.ascontiguousarray(scores.reshape(-1, scores.shape[-1]))
            losses, *slopes = dense_loss(flat, self.labels[index], *(bound.reshape(-1) for bound in bounds))
            return losses, slopes
        answer = np.empty((len(index), 4))
        values = [np.ascontiguousarray(part.detach().reshape(-1).numpy()) for part in outputs]

        def work(rows: slice) -> None:
            at = index[rows]
            given = [self.sorted.scores[at], self.sorted.label_scores[at], *(value[rows] for value in values)]
            arrays = [*given, self.cuts[at], answer[rows]]
            tempered_in_box(*arrays)

        over_rows(work, len(index), worth=len(index) * self.sorted.num_classes > SMALL)
        return answer[:, 0], list(answer.T[1:])

    def of(self, index: NDArray[np.int64]) -> Tensor | None:
        """Give the log probabilities (R, n, K) where the method maps them."""
        return None if self.log_probabilities is None else self.log_probabilities[torch.from_numpy(index)]


def train(recipe: Recipe, logits: Tensor, labels: Tensor, most: float = math.inf) -> float:
    """Train by Adam; return the seconds of a step."""
    inputs, rows = recipe.inputs(logits), Rows(logits, labels, recipe.base)
    optimiser = torch.optim.Adam(recipe.parameters)
    rngs = [np.random.default_rng(seed) for _, _, seed in recipe.runs]
    steps, began = 0, time.process_time()
    for _ in range(EPOCHS):
        orders = np.stack([rng.permutation(len(labels)) for rng in rngs])
        for begin in range(0, len(labels), BATCH):
            index = orders[:, begin : begin + BATCH]
            columns = torch.from_numpy(index)[..., None].expand(-1, -1, inputs.shape[2])
            outputs = recipe(inputs.gather(1, columns), rows.of(index))
            _, slopes = rows.losses(index.reshape(-1), outputs)
            pairs = [
                (out, torch.from_numpy(slope).reshape(out.shape) / index.shape[1])
                for out, slope in zip(outputs, slopes, strict=True)
                if out.requires_grad
            ]
            penalty = recipe.penalty()
            if penalty.requires_grad:
                pairs.append((penalty, torch.ones(())))
            optimiser.zero_grad()
            torch.autograd.backward([out for out, _ in pairs], [slope for _, slope in pairs])
            optimiser.step()
            steps += 1
            if steps >= most:
                return (time.process_time() - began) / steps
    return (time.process_time() - began) / steps


def losses_of(recipe: Recipe, logits: Tensor, labels: Tensor) -> Array:
    """Give the losses of every run (R, N)."""
    rows, every = Rows(logits, labels, recipe.base), np.arange(len(labels))
    parts = []
    for index in np.array_split(every, max(1, len(every) * recipe.num_classes // 50_000)):
        wide = np.tile(index, (len(recipe.runs), 1))
        with torch.no_grad():
            outputs = recipe(recipe.inputs(logits[index]), rows.of(wide))
        parts.append(rows.losses(wide.reshape(-1), outputs)[0].reshape(wide.shape))
    return np.concatenate(parts, axis=1)


def run_recipe(method: str, val: Labelled, test: Labelled, seeds: int) -> dict[str, Any]:
    """Train all variants; give their losses (variants, seeds, N) and the seconds of one run."""
    base = method.removesuffix("+pb-mlp")
    strength, starts = 0.0, list(STARTS)
    if base == "dirichlet":
        strength = vars(fit("dirichlet", *val).calibrator.logit_map)["strength"]
        starts = starts if val[0].shape[1] <= SMALLER else starts[1:2]
    variants = list(itertools.product(starts, INPUTS))
    runs = [(start, scaling, seed) for start, scaling in variants for seed in range(seeds)]
    with one_library_thread():
        recipe = Recipe(method, runs, val[0], strength)
        train(recipe, *val)
        reached = [losses_of(recipe, *data).reshape(len(variants), seeds, -1) for data in (val, test)]
        step = train(Recipe(method, runs[:1], val[0], strength), *val, most=TIMED_STEPS)
    return {
        "variants": [", ".join(variant) for variant in variants],
        "validation": reached[0].mean(axis=2),
        "test": reached[1],
        "seconds": step * EPOCHS * math.ceil(len(val[1]) / BATCH),
    }


def run_boxcal(method: str, val: Labelled, test: Labelled, seeds: int) -> dict[str, Any]:
    """Fit with each seed; give the losses (1, seeds, N) and the seconds of the fastest fit."""
    fits, seconds = [], []
    for seed in range(seeds):
        began = time.process_time()
        fits.append(fit(method, *val, seed=seed))
        seconds.append(time.process_time() - began)
    answers = [one.calibrator(test[0]).gather(1, test[1][:, None])[:, 0] for one in fits]
    return {
        "variants": ["boxcal"],
        "validation": np.array([[one.nll for one in fits]]),
        "test": -torch.stack(answers).log().numpy()[None],
        "seconds": min(seconds),
    }


def row(name: str, method: str, recipe: Any, boxcal: Any) -> str:
    """Write one row of the table.

    The standard error of the difference is that of the test samples, paired, and of the seeds where there are
    several.
    """
    best = int(np.nanargmin(recipe["test"].mean(axis=(1, 2))))  # some runs diverge
    theirs, ours = recipe["test"][best], boxcal["test"][0]
    paired = ours.mean(axis=0) - theirs.mean(axis=0)
    several = [values.mean(axis=1) for values in (theirs, ours) if len(values) > 1]
    seeds = [values.std(ddof=1) / math.sqrt(len(values)) for values in several]
    error = math.hypot(paired.std() / math.sqrt(len(paired)), *seeds)
    times = f"{recipe['seconds']:.1f} | {boxcal['seconds']:.1f}"
    numbers = [
        f"{losses.mean():.4f} ({validation.mean():.4f})"
        for losses, validation in ((theirs, recipe["validation"][best]), (ours, boxcal["validation"]))
    ]
    return (
        f"| {name} | `{method}` | {recipe['variants'][best]} | {numbers[0]} | {numbers[1]}"
        f" | {paired.mean():+.4f} ({error:.4f}) | {times} |"
    )


def main() -> None:
    """Run what is not stored, and print one line per set and method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=["recipe", "boxcal"])
    parser.add_argument("--store", type=Path, default=STORE, help="folder of the results")
    options = parser.parse_args()
    runs = {"recipe": run_recipe, "boxcal": run_boxcal}
    options.store.mkdir(exist_ok=True)
    print(
        "| set | method | the recipe's best: start, inputs | test NLL (validation) | boxcal"
        " | difference (SE) | time, s | boxcal, s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for folder in options.folders:
        val, test = read(folder / "val.npz"), read(folder / "test.npz")
        for method in options.methods.split(","):
            stored = {side: options.store / f"{folder.name}-{method}-{side}.npz" for side in runs}
            for side in [options.only] if options.only else runs:
                if not stored[side].exists():
                    np.savez(stored[side], **runs[side](method, val, test, options.seeds))
            if all(file.exists() for file in stored.values()):
                print(row(folder.name, method, *map(np.load, stored.values())), flush=True)


if __name__ == "__main__":
    main()
