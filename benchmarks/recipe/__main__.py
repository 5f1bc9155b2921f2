"""Instance-dependent methods beside the paper's recipe, with its starts and the scaling of its inputs varied.

    python -m benchmarks.recipe FOLDER... [--methods pb-mlp,pts] [--seeds 3] [--only recipe|boxcal|times]

A folder holds `val.npz` and `test.npz` with `logits` (N, K) or `probabilities`, and `labels`. The recipe is
Adam with a learning rate of 1e-3, 500 epochs in batches of 256, and networks of two hidden layers of five
ReLU units over the ten largest logits. All variants of a set are trained side by side, each as it would be
alone. The affine map of `dirichlet` starts at the identity, and has the penalty that boxcal's
cross-validation chooses. The losses of each method are stored, and a run does only what is not stored.

A second table compares processor times on one thread, which are not stored. That of the recipe is
extrapolated from some steps of one run: in PyTorch with the authors' operator, if `bcsoftmax` is installed
(github.com/neonnnnn/torchbcsoftmax), in PyTorch with boxcal's operator, and with the closed-form derivatives
of sorted rows that boxcal's fits are made of, which also train the variants.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import math
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from benchmarks import command_line
from benchmarks.paper.sets import read
from benchmarks.recipe.model import INPUTS, STARTS, Recipe
from benchmarks.recipe.training import BATCH, EPOCHS, TIMED_STEPS, losses_of, seconds_by_autograd, train
from boxcal.calibrators import box_constrained_softmax, fit, threads
from boxcal.calibrators.threads import one_library_thread

METHODS = "pb-mlp,ts+pb-mlp,pts,pts+pb-mlp,dirichlet+pb-mlp"
STORE = Path(__file__).parents[1] / "results" / "recipe"
SMALLER = 50
"""Classes above which `dirichlet` is run from one start only."""
LARGE, FEW_ROWS = 500, 16
"""Classes above which steps with the authors' operator have few rows: it keeps K x K numbers for each."""

Labelled = tuple[Tensor, Tensor]
"""Logits and labels."""


def labelled(path: Path) -> Labelled:
    data = read(path)
    return torch.from_numpy(data.scores), torch.from_numpy(data.labels)


def strength_of(method: str, val: Labelled) -> float:
    """Give the penalty that boxcal chooses for `dirichlet`; 0 for other methods."""
    if not method.startswith("dirichlet"):
        return 0.0
    return float(vars(fit("dirichlet", *val).calibrator.logit_map)["strength"])


def run_recipe(method: str, val: Labelled, test: Labelled, seeds: int) -> dict[str, Any]:
    """Train all variants; give their losses (variants, seeds, N)."""
    starts = list(STARTS)
    if method.startswith("dirichlet") and val[0].shape[1] > SMALLER:
        starts = starts[1:2]
    variants = list(itertools.product(starts, INPUTS))
    runs = [(start, scaling, seed) for start, scaling in variants for seed in range(seeds)]
    with one_library_thread():
        recipe = Recipe(method, runs, val[0], strength_of(method, val))
        train(recipe, *val)
        reached = [losses_of(recipe, *data).reshape(len(variants), seeds, -1) for data in (val, test)]
    return {
        "variants": [", ".join(variant) for variant in variants],
        "validation": reached[0].mean(axis=2),
        "test": reached[1],
    }


def run_boxcal(method: str, val: Labelled, test: Labelled, seeds: int) -> dict[str, Any]:
    fits = [fit(method, *val, seed=seed) for seed in range(seeds)]
    answers = [one.calibrator(test[0]).gather(1, test[1][:, None])[:, 0] for one in fits]
    return {
        "variants": ["boxcal"],
        "validation": np.array([[one.nll for one in fits]]),
        "test": -torch.stack(answers).log().numpy()[None],
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
    numbers = [
        f"{losses.mean():.4f} ({validation.mean():.4f})"
        for losses, validation in ((theirs, recipe["validation"][best]), (ours, boxcal["validation"]))
    ]
    return (
        f"| {name} | `{method}` | {recipe['variants'][best]} | {numbers[0]} | {numbers[1]}"
        f" | {paired.mean():+.4f} ({error:.4f}) |"
    )


def times(name: str, method: str, val: Labelled) -> str:
    """Write one row of the table of times: of three ways to run the recipe, and of boxcal's fit."""
    steps = EPOCHS * math.ceil(len(val[1]) / BATCH)
    strength = strength_of(method, val)

    def recipe() -> Recipe:
        return Recipe(method, [(STARTS[1], INPUTS[0], 0)], val[0], strength)

    def seconds(operator: Any, batch: int = BATCH) -> float:
        return steps * seconds_by_autograd(recipe(), *val, operator, batch)

    authors, rows = math.nan, FEW_ROWS if val[0].shape[1] > LARGE else BATCH
    with one_library_thread():
        if "pb" in method and importlib.util.find_spec("bcsoftmax"):
            operator = importlib.import_module("bcsoftmax").bcsoftmax
            authors = seconds(lambda x, low, high: operator(x, low.expand_as(x), high.expand_as(x)), rows)
        found = [authors, seconds(box_constrained_softmax), steps * train(recipe(), *val, most=TIMED_STEPS)]
    fits = []
    with patch.object(threads, "THREADS", 1):
        for _ in range(2):
            began = time.process_time()
            fit(method, *val)
            fits.append(time.process_time() - began)
    cells = ["-" if math.isnan(one) else f"{one:,.1f} s, {one / min(fits):,.1f}" for one in found]
    return f"| {name} | `{method}` | {' | '.join(cells)} | {min(fits):.1f} s |"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=["recipe", "boxcal", "times"])
    parser.add_argument("--store", type=Path, default=STORE, help="folder of the results")
    options = parser.parse_args()
    runs = {"recipe": run_recipe, "boxcal": run_boxcal}
    options.store.mkdir(parents=True, exist_ok=True)
    methods = options.methods.split(",")
    if options.only != "times":
        print(
            "| set | method | the recipe's best: start, inputs | test NLL (validation) | boxcal"
            " | difference (SE) |"
        )
        print("|---|---|---|---|---|---|")
        for folder, method in itertools.product(options.folders, methods):
            data = labelled(folder / "val.npz"), labelled(folder / "test.npz")
            stored = {side: options.store / f"{folder.name}-{method}-{side}.npz" for side in runs}
            for side in [options.only] if options.only else runs:
                if not stored[side].exists():
                    np.savez(stored[side], **runs[side](method, *data, options.seeds))
            if all(file.exists() for file in stored.values()):
                print(row(folder.name, method, *map(np.load, stored.values())), flush=True)
    if options.only in {None, "times"}:
        print(
            "\n| set | method | recipe in PyTorch, authors' operator | recipe in PyTorch, boxcal's operator"
            " | recipe, closed-form derivatives | boxcal |"
        )
        print("|---|---|---|---|---|---|")
        for folder, method in itertools.product(options.folders, methods):
            print(times(folder.name, method, labelled(folder / "val.npz")), flush=True)


if __name__ == "__main__":
    main()
