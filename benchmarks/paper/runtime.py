"""The paper's figure of the run time of the operator, against the number of classes and of rows.

The problem is that of its appendix "Runtime Comparison": logits of standard deviation 3, random bounds for
every class of every row, float32. The naive baseline bisects the normaliser. One thread, processor time.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.operator import Call, alternate, others, paper_problem, processor, softmax
from boxcal.calibrators.operator import box_constrained_softmax

CLASSES = tuple(2**power for power in range(5, 13))
ROWS = tuple(4**power for power in range(7))
BATCH, WIDTH = 128, 1000
"""Rows while the classes vary, and classes while the rows do."""
ROUNDS, HALVINGS = 7, 60
SLOW = 128
"""Other installed implementations are run with at most this many classes."""
SIDES = {
    "softmax": "softmax",
    "softmax_backward": "softmax, backward",
    "exact": "box-constrained softmax",
    "exact_backward": "box-constrained softmax, backward",
    "bisection": "bisection",
}


def bisection(logits: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Halve the range of log Z in float64, until it is below the resolution of float32."""
    scores, low, high = (part.double() for part in (logits, lower, upper))
    least = scores.amin(dim=1, keepdim=True) - high.clamp_min(1e-300).log().amax(dim=1, keepdim=True) - 1
    most = scores.amax(dim=1, keepdim=True) - low.clamp_min(1e-300).log().amin(dim=1, keepdim=True) + 1
    for _ in range(HALVINGS):
        middle = 0.5 * (least + most)
        above = torch.clamp((scores - middle).exp(), low, high).sum(dim=1, keepdim=True) > 1.0
        least, most = torch.where(above, middle, least), torch.where(above, most, middle)
    return torch.clamp((scores - least).exp(), low, high).to(logits.dtype)


def sides(rows: int, classes: int) -> dict[str, Call]:
    logits, lower, upper = paper_problem(rows, classes, seed=0)
    leaf, upstream = logits.clone().requires_grad_(), torch.randn_like(logits)

    def exact(rows_: Tensor) -> Tensor:
        return box_constrained_softmax(rows_, lower, upper)

    plain, boxed = softmax(leaf), exact(leaf)
    return {
        "softmax": lambda: softmax(logits),
        "softmax_backward": lambda: torch.autograd.grad(plain, leaf, upstream, retain_graph=True),
        "exact": lambda: exact(logits),
        "exact_backward": lambda: torch.autograd.grad(boxed, leaf, upstream, retain_graph=True),
        "bisection": lambda: bisection(logits, lower, upper),
    }


def measure() -> dict[str, Any]:
    """Time all sizes; medians over the rounds, in seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    entries = []
    for rows, classes in [(BATCH, size) for size in CLASSES] + [(size, WIDTH) for size in ROWS]:
        calls = sides(rows, classes)
        if rows == BATCH and classes <= SLOW:
            calls |= others(*paper_problem(rows, classes, seed=0))
        times = {name: statistics.median(each) for name, each in alternate(calls, rounds=ROUNDS).items()}
        entries.append({"rows": rows, "classes": classes, **times})
        print(f"{rows} x {classes}: bisection {times['bisection'] / times['exact']:.1f} times as long")
    torch.set_num_threads(threads)
    return {"processor": processor(), "torch": torch.__version__, "rounds": ROUNDS, "results": entries}


def plot(document: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure  # noqa: PLC0415 - only the plot needs it

    figure = Figure(figsize=(9, 4))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, varied, fixed, size in zip(
        panels, ("classes", "rows"), ("rows", "classes"), (BATCH, WIDTH), strict=True
    ):
        entries = [one for one in document["results"] if one[fixed] == size]
        names = dict.fromkeys(key for one in entries for key in one if key not in {"rows", "classes"})
        for name in names:
            known = [one for one in entries if name in one]
            axes.plot(
                [one[varied] for one in known],
                [1e3 * one[name] for one in known],
                marker="o",
                markersize=3,
                linestyle="--" if name.endswith("backward") else "-",
                label=SIDES.get(name, name),
            )
        axes.set(xscale="log", yscale="log", xlabel=varied, title=f"{size:,} {fixed}")
    panels[0].set_ylabel("time, ms")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
