"""Compares the times of fits with alternatives in one run; prints a Markdown table.

    python -m benchmarks.fits [--only ts,pb,recipe,auto,memory]

The data are overconfident logits drawn from a known model. Temperature scaling is compared with that of
scikit-learn, and probability bounding with the paper's recipe: Adam for 500 epochs in batches of 256, on the
authors' operator if `bcsoftmax` is installed (github.com/neonnnnn/torchbcsoftmax). A few steps of the recipe
are timed with few rows and extrapolated, because the time of a step is linear in its rows. All steps are also
run from each of several starts with the closed-form gradient, to determine the final likelihoods.
"""

from __future__ import annotations

import importlib
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.calibration import CalibratedClassifierCV
from sklearn.frozen import FrozenEstimator
from torch import Tensor

from benchmarks import command_line
from boxcal.calibrators import fit
from boxcal.calibrators.operator.uniform import SortedRows

SAMPLES = 10_000
EPOCHS, BATCH = 500, 256
TIMED_ROWS, TIMED_STEPS = 16, 3
STARTS = ((-3.0, 3.0), (-3.0, 2.0), (-2.0, 1.0), (0.0, 0.0))
"""Raw numbers that the paper's recipe starts from: (a', b'), of which the paper names none."""
DRAWN = 8
"""Starts drawn besides, from a normal distribution of standard deviation 2."""
MEMORY = (50_000, 1000)


class Scores(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier whose decision function is its input, for scikit-learn's calibration."""

    def fit(self, X: NDArray[np.float64], y: NDArray[np.int64]) -> Scores:
        self.classes_ = np.arange(X.shape[1])
        return self

    def decision_function(self, X: NDArray[np.float64]) -> NDArray[np.float64]:
        return X

    def predict(self, X: NDArray[np.float64]) -> NDArray[np.int64]:
        largest: NDArray[np.int64] = X.argmax(axis=1)
        return largest


def overconfident(num_samples: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return logits that are twice as large as those from which the labels are drawn."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(num_samples, num_classes, generator=generator) * 1.5
    favoured = torch.randint(num_classes, (num_samples, 1), generator=generator)
    logits.scatter_add_(1, favoured, torch.full((num_samples, 1), math.log(num_classes) + 4.0))
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return logits * 2.0, labels


def seconds(work: Callable[[], object], repeats: int = 3) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def row(*cells: object) -> None:
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def temperature(num_classes: int = 100) -> None:
    logits, labels = overconfident(SAMPLES, num_classes)
    X, y = logits.double().numpy(), labels.numpy()
    frozen = FrozenEstimator(Scores().fit(X, y))
    ours = seconds(lambda: fit("ts", logits, labels))
    theirs = seconds(lambda: CalibratedClassifierCV(frozen, method="temperature").fit(X, y))
    row("ts", num_classes, f"{ours:.3f} s", f"scikit-learn {theirs:.3f} s", f"{theirs / ours:.1f}")


def bounds() -> None:
    """Time `pb` and `ts+pb`, and `ts` on the same data."""
    for method, num_classes in (("pb", 100), ("pb", 1000), ("ts+pb", 100)):
        logits, labels = overconfident(SAMPLES, num_classes)
        base = seconds(lambda: fit("ts", logits, labels), 2)  # noqa: B023 - called at once
        ours = seconds(lambda: fit(method, logits, labels), 2)  # noqa: B023 - called at once
        row(method, num_classes, f"{ours:.2f} s", f"ts {base:.3f} s", f"{base / ours:.3f}")


class Recipe:
    """The paper's fit of `pb`: Adam with default settings on two parameters."""

    def __init__(self, num_classes: int, start: tuple[float, float] = STARTS[0]) -> None:
        self.num_classes = num_classes
        self.raw = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        self.optimiser = torch.optim.Adam([self.raw])

    def bounds(self) -> tuple[Tensor, Tensor]:
        """Lower and upper bound, between 0 and 1/K and between 1/K and 1."""
        share = 1 / self.num_classes
        return share * torch.sigmoid(self.raw[0]), share + (1 - share) * torch.sigmoid(self.raw[1])

    def step_with(self, operator: Callable[[Tensor, Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> None:
        """Run one step on a batch of logits, as in the authors' code."""
        lower, upper = (bound.to(x.dtype).expand_as(x) for bound in self.bounds())
        self.optimiser.zero_grad()
        torch.autograd.backward(torch.nn.functional.nll_loss(operator(x, lower, upper).log(), y))
        self.optimiser.step()

    def step_on(self, rows: SortedRows, batch: NDArray[np.int64]) -> None:
        """Run the same step on some of the prepared rows, with the closed-form gradient."""
        lower, upper = self.bounds()
        _, by_lower, by_upper = rows.rows(batch).nll(lower.item(), upper.item())
        slopes = [torch.tensor(slope) for slope in (by_lower, by_upper)]
        self.optimiser.zero_grad()
        torch.autograd.backward([lower, upper], slopes)
        self.optimiser.step()


def reached(rows: SortedRows, start: tuple[float, float]) -> float:
    """Make all steps of the paper's recipe from a start, and give the NLL at the end."""
    trained, rng = Recipe(rows.num_classes, start), np.random.default_rng(0)
    for _ in range(EPOCHS):
        order = rng.permutation(rows.num_rows)
        for begin in range(0, rows.num_rows, BATCH):
            trained.step_on(rows, order[begin : begin + BATCH])
    return rows.nll(*(bound.item() for bound in trained.bounds())).value


def recipe(num_classes: int = 1000) -> None:
    """Compare `pb` with the paper's recipe: its time is extrapolated, its NLL is that after all steps.

    Steps are timed with the authors' operator; the complete recipe is run with ours.
    """
    logits, labels = overconfident(SAMPLES, num_classes)
    found = fit("pb", logits, labels)
    ours = seconds(lambda: fit("pb", logits, labels), 2)
    rows = SortedRows(logits, labels)
    drawn = np.random.default_rng(0).normal(0.0, 2.0, (DRAWN, 2)).tolist()
    for start in (*STARTS, *map(tuple, drawn)):
        recipe_end = f"the paper's recipe from ({start[0]:.1f}, {start[1]:.1f}): {reached(rows, start):.7f}"
        row("pb, NLL", num_classes, f"{found.nll:.7f}", recipe_end, "-")
    try:
        operator = importlib.import_module("bcsoftmax").bcsoftmax
    except ImportError:
        row("pb", num_classes, f"{ours:.2f} s", "the authors' operator is not installed", "-")
        return
    timed, x, y = Recipe(num_classes), logits[:TIMED_ROWS], labels[:TIMED_ROWS]
    theirs = seconds(lambda: timed.step_with(operator, x, y), TIMED_STEPS) / TIMED_ROWS * SAMPLES * EPOCHS
    steps = EPOCHS * math.ceil(SAMPLES / BATCH)
    row(
        "pb",
        num_classes,
        f"{ours:.2f} s",
        f"the paper's recipe, {steps} steps: {theirs:,.0f} s (extrapolated)",
        f"{theirs / ours:,.0f}",
    )


def automatic(num_classes: int = 100) -> None:
    """Time `auto` with every method that reads logits."""
    logits, labels = overconfident(SAMPLES, num_classes)
    result = fit("auto", logits, labels)
    row("auto", num_classes, f"{result.seconds:.0f} s", f"chose {result.method}", "-")


def memory() -> None:
    """Return the peak memory of a process that fits `pb` to 50,000 samples of 1000 classes."""
    code = f"from benchmarks.fits import peak; peak{MEMORY}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    row("pb", f"{MEMORY[1]} (N = {MEMORY[0]:,})", done.stdout.strip(), "peak memory of the process", "-")


def peak(num_samples: int, num_classes: int) -> None:
    logits, labels = overconfident(num_samples, num_classes)
    fit("pb", logits, labels)
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


PARTS: dict[str, Callable[[], None]] = {
    "ts": temperature,
    "pb": bounds,
    "recipe": recipe,
    "auto": automatic,
    "memory": memory,
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--only", default=",".join(PARTS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    small = overconfident(100, 4)
    for method in ("ts+pb", "lb"):
        fit(method, *small)
    row("fit", "K", f"N = {SAMPLES:,}", "beside it", "times faster")
    row(*["---"] * 5)
    for name in options.only.split(","):
        PARTS[name]()


if __name__ == "__main__":
    main()
