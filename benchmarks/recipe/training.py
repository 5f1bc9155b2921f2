"""Adam for the recipe, with closed-form derivatives or by autograd."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.recipe.model import Recipe
from boxcal.calibrators.fitting.rows import TemperedRows, dense_loss
from boxcal.calibrators.operator.uniform import SortedRows

EPOCHS, BATCH = 500, 256
WARM_STEPS, TIMED_STEPS, TIMED_SECONDS = 3, 200, 5.0
"""Steps to time at least and at most, and the seconds after which no other one begins."""

Array = NDArray[np.float64]
Operator = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Logits (n, K) and bounds, each (n, 1), to probabilities (n, K)."""


class Rows:
    """Rows sorted once, and their losses under temperatures and bounds of their own."""

    def __init__(self, logits: Tensor, labels: Tensor, base: str) -> None:
        self.tempered, self.labels = TemperedRows(SortedRows(logits, labels)), labels.numpy()
        self.log_probabilities = logits.log_softmax(dim=1) if base == "dirichlet" else None

    def losses(self, index: NDArray[np.int64], outputs: list[Tensor]) -> tuple[Array, list[Array]]:
        """Give the losses of some rows, and their derivatives in each output."""
        if self.log_probabilities is not None:
            scores, *bounds = (part.detach().numpy() for part in outputs)
            flat = np.ascontiguousarray(scores.reshape(-1, scores.shape[-1]))
            losses, *slopes = dense_loss(flat, self.labels[index], *(bound.reshape(-1) for bound in bounds))
            return losses, slopes
        values = [np.ascontiguousarray(part.detach().reshape(-1).numpy()) for part in outputs]
        losses, *slopes = self.tempered.rows(index).losses(*values)
        return losses, slopes

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


def seconds_by_autograd(
    recipe: Recipe, logits: Tensor, labels: Tensor, operator: Operator, batch: int
) -> float:
    """Time a step of one run in PyTorch: its forward pass in float32, autograd, and Adam.

    The time of a step of fewer rows than `BATCH` is multiplied accordingly.
    """
    inputs, rows, scores = recipe.inputs(logits), Rows(logits, labels, recipe.base), logits.float()
    optimiser, rng = torch.optim.Adam(recipe.parameters), np.random.default_rng(0)
    seconds: list[float] = []
    while len(seconds) < WARM_STEPS or (sum(seconds) < TIMED_SECONDS and len(seconds) < TIMED_STEPS):
        index = rng.integers(0, len(labels), batch)
        began = time.process_time()
        first, lower, upper = (part[0] for part in recipe(inputs[:, index], rows.of(index[None])))
        mapped = first if recipe.base == "dirichlet" else scores[index] * first[:, None]
        if recipe.box:
            answer = operator(mapped.float(), lower.float()[:, None], upper.float()[:, None]).log()
        else:
            answer = mapped.float().log_softmax(dim=1)
        loss = torch.nn.functional.nll_loss(answer, labels[index]) + recipe.penalty()
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call] # as torch declares it
        optimiser.step()
        seconds.append(time.process_time() - began)
    return float(np.median(seconds[1:])) * BATCH / batch
