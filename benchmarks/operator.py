"""Compares the operator with `torch.softmax` and others: time of forward and backward passes, peak memory.

`make bench-operator` prints a table and writes benchmarks/results/operator.json and docs/images/operator.svg.
It measures alternating rounds, the CPU time of one thread and the wall-clock time of two, and reports medians
and quartiles. Beside them stand the passes over a row, and a limit: what a copy of as many bytes takes. The
authors' package `bcsoftmax` and `cvxpylayers` are included if they are installed (neither is a dependency).
"""

import argparse
import ctypes
import importlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.operator import box_constrained_softmax, cpu_loops

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "operator.json"
PLOT = ROOT / "docs" / "images" / "operator.svg"
SIZES = ((128, 2), (128, 32), (128, 100), (1, 1000), (128, 1000), (128, 10_000), (16, 100_000))
THREADS = (1, 2)
SLOW_LIMIT = 1000
"""Slow implementations are called only a few times, with at most this many classes."""

Call = Callable[[], Any]


class Nothing(torch.autograd.Function):
    """A backward pass that does nothing, to measure the overhead of autograd."""

    @staticmethod
    def forward(_ctx: Any, rows: Tensor) -> Tensor:
        return torch.empty_like(rows)

    @staticmethod
    def backward(_ctx: Any, upstream: Tensor) -> Tensor:
        return torch.empty_like(upstream)


def paper_problem(rows: int, classes: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the synthetic problem of the paper's appendix "Runtime Comparison"."""
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, classes, generator=random)
    upper = torch.rand(rows, classes, generator=random)
    upper = upper / upper.sum(-1, keepdim=True).clamp(max=1)
    lower = (torch.rand(rows, classes, generator=random) / classes).minimum(upper)
    return logits, lower, upper


def problems(rows: int, classes: int) -> dict[str, tuple[Tensor, float | Tensor, float | Tensor]]:
    """Return the bounds: vectors, tight vectors, one number active in half of the rows, one never active.

    The tight ones have upper bounds that sum to 1.05, and hold most of the classes.
    """
    logits, lower, upper = paper_problem(rows, classes, seed=0)
    tight = 1.05 * upper / upper.sum(-1, keepdim=True)
    half = float(logits.softmax(-1).amax(-1).median())
    return {
        "vector": (logits, lower, upper),
        "tight": (logits, torch.zeros_like(tight), tight.clamp(max=1)),
        "half": (logits, 0.0, half),
        "nowhere": (logits, 0.0, 1.0),
    }


def passes(logits: Tensor, lower: float | Tensor, upper: float | Tensor) -> float:
    """Count the passes over a row in which the search adds up masses, mean of all rows.

    The search itself runs uncompiled, so that its compiled passes can be counted.
    """
    rows, calls = logits.numpy(), mock.Mock(side_effect=cpu_loops._split)
    boxes = [torch.as_tensor(bound).expand(logits.shape).contiguous().numpy() for bound in (lower, upper)]
    weights, side = np.empty_like(rows[0]), np.empty(0, np.int8)
    loops: Any = cpu_loops
    exponentials = loops._exponentials

    def typed(row: Any, anchor: float, *others: Any) -> float:
        return float(exponentials(row, row.dtype.type(anchor), *others))

    def is_number(_bound: Any) -> bool:
        return not isinstance(upper, Tensor)

    with mock.patch.multiple(cpu_loops, _split=calls, _exponentials=typed, _is_number=is_number):
        for row, low, high in zip(rows, *boxes, strict=True):
            top = row.max()
            scale = 1.0 / typed(row, top, 1.0, weights)
            if ((weights * scale >= low) & (weights * scale <= high)).all():
                continue
            if len(row) >= cpu_loops.LONG:
                box = (True, float(low.sum()), float(high.sum()))
                scale = loops._approach.py_func(weights, low, high, box, scale)
            loops._search.py_func(row, low, high, 1.0, top, weights, scale, side)
    return calls.call_count / len(rows)


def alternate(sides: dict[str, Call], *, rounds: int) -> dict[str, list[float]]:
    """Time each function once per round, in turn; return seconds per call."""
    repeats, clock = {}, time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for name, call in sides.items():
        call()
        began = clock()
        call()
        repeats[name] = max(1, int(0.004 / (clock() - began)))

    def seconds(name: str) -> float:
        began = clock()
        for _ in range(repeats[name]):
            sides[name]()
        return (clock() - began) / repeats[name]

    return in_turns(sides, rounds, seconds)


def in_turns(names: Iterable[str], rounds: int, seconds: Callable[[str], float]) -> dict[str, list[float]]:
    """Time each side once per round."""
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, times in found.items():
            times.append(seconds(name))
    return found


def slow_seconds(call: Call) -> float:
    """Return the CPU time of all threads for a slow call (median of three below a second)."""
    times: list[float] = []
    while len(times) < 4 and sum(times) < 1.0:
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return statistics.median(times[1:] or times)


def peak_bytes(call: Call) -> int:
    """Return the growth of the process's memory during the call (Linux with glibc)."""
    call()
    ctypes.CDLL(None).malloc_trim(
        0
    )  # Otherwise memory that earlier calls freed would be reused and not be counted.
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return max(0, _status("VmHWM") - before)


def processor() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def softmax(rows: Tensor) -> Tensor:
    return torch.softmax(rows, -1)


def training_step(name: str, function: Callable[[Tensor], Tensor], logits: Tensor) -> dict[str, Call]:
    rows = logits.clone().requires_grad_()
    answer, upstream = function(rows), torch.randn_like(logits)
    return {
        f"training_{name}": lambda: function(rows),
        f"backward_{name}": lambda: torch.autograd.grad(answer, rows, upstream, retain_graph=True),
    }


def others(logits: Tensor, lower: Tensor, upper: Tensor) -> dict[str, Call]:
    """Return the other installed implementations, for the same problem."""
    found: dict[str, Call] = {}
    try:
        authors = importlib.import_module("bcsoftmax")
        found["authors"] = lambda: authors.bcsoftmax(logits, lower, upper)
    except (ImportError, AttributeError):
        pass
    try:
        layer = _convex_layer(logits.shape[1])
        found["cvxpylayers"] = lambda: layer(logits, lower, upper)
    except ImportError:
        pass
    return found


def _convex_layer(classes: int) -> Any:
    cvxpy = importlib.import_module("cvxpy")
    layers = importlib.import_module("cvxpylayers.torch")
    p, (g, a, b) = cvxpy.Variable(classes), (cvxpy.Parameter(classes) for _ in range(3))
    program = cvxpy.Problem(
        cvxpy.Maximize(g @ p + cvxpy.sum(cvxpy.entr(p))), [cvxpy.sum(p) == 1, p >= a, p <= b]
    )
    return layers.CvxpyLayer(program, parameters=[g, a, b], variables=[p])


def measure(rounds: int) -> list[dict[str, Any]]:
    table = []
    for rows, classes in SIZES:
        for box, (logits, lower, upper) in problems(rows, classes).items():

            def ours(rows_: Tensor, low: float | Tensor = lower, high: float | Tensor = upper) -> Tensor:
                return box_constrained_softmax(rows_, low, high)

            buffer = torch.empty_like(logits)
            forward = alternate(
                {
                    "forward_softmax": lambda g=logits: softmax(g),  # type: ignore[misc]
                    "forward_ours": lambda g=logits, f=ours: f(g),  # type: ignore[misc]
                    "forward_copy": lambda g=logits, to=buffer: to.copy_(g),  # type: ignore[misc]
                },
                rounds=rounds,
            )
            training: dict[str, list[float]] = {}
            for name, function in (("softmax", softmax), ("ours", ours), ("engine", Nothing.apply)):
                training |= alternate(training_step(name, function, logits), rounds=rounds)
            entry: dict[str, Any] = {
                "rows": rows,
                "classes": classes,
                "box": box,
                "logits_bytes": logits.nbytes,
                "threads": torch.get_num_threads(),
            }
            for side, values in (forward | training).items():
                entry[side] = statistics.median(values)
                entry[f"{side}_quartiles"] = statistics.quantiles(values, n=4)[::2]
            entry["passes"] = passes(
                logits[:16], *(b if isinstance(b, float) else b[:16] for b in (lower, upper))
            )
            copies = 2 if isinstance(upper, Tensor) else 1
            entry["limit"] = copies * entry["forward_copy"]
            entry["ratio"] = entry["forward_ours"] / entry["forward_softmax"]
            each = [a / b for a, b in zip(forward["forward_ours"], forward["forward_softmax"], strict=True)]
            entry["ratio_quartiles"] = statistics.quantiles(each, n=4)[::2]
            entry["backward_over_forward"] = entry["backward_ours"] / entry["training_ours"]
            entry["peak_copies"] = peak_bytes(lambda g=logits, f=ours: f(g)) / logits.nbytes  # type: ignore[misc]
            if box == "vector" and classes <= SLOW_LIMIT and torch.get_num_threads() == 1:
                for name, call in others(*paper_problem(rows, classes, seed=0)).items():
                    entry[f"forward_{name}"] = slow_seconds(call)
            table.append(entry)
            print(line(entry), flush=True)
    return table


def line(entry: dict[str, Any]) -> str:
    extra = "".join(
        f"  {name} {entry[key] / entry['forward_ours']:,.0f}x"
        for name in ("authors", "cvxpylayers")
        if (key := f"forward_{name}") in entry
    )
    return (
        f"{entry['threads']} threads  {entry['rows']:4d} x {entry['classes']:6d}  {entry['box']:8s}"
        f"  softmax {entry['forward_softmax'] * 1e6:9.1f} us  ours {entry['forward_ours'] * 1e6:9.1f} us"
        f"  ratio {entry['ratio']:5.2f} ({' to '.join(f'{q:.2f}' for q in entry['ratio_quartiles'])})"
        f"  passes {entry['passes']:4.1f}  limit {entry['limit'] * 1e6:9.1f} us"
        f"  training {entry['training_ours'] * 1e6:9.1f} us"
        f"  backward {entry['backward_ours'] * 1e6:9.1f} us ({entry['backward_over_forward']:4.2f};"
        f" softmax {entry['backward_softmax'] * 1e6:.1f}, engine {entry['backward_engine'] * 1e6:.1f})"
        f"  peak {entry['peak_copies']:4.2f} copies{extra}"
    )


def plot(table: list[dict[str, Any]], path: Path) -> None:
    """Plot the ratio to softmax against the number of classes, medians with quartiles."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - only the plot needs it

    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for box in ("vector", "tight", "half", "nowhere"):
        chosen = [e for e in table if e["box"] == box and e["threads"] == 1 and e["rows"] > 1]
        ratios = [e["ratio"] for e in chosen]
        spread = [
            [max(0.0, sign * (e["ratio_quartiles"][end] - e["ratio"])) for e in chosen]
            for end, sign in ((0, -1), (1, 1))
        ]
        axes.errorbar([e["classes"] for e in chosen], ratios, spread, marker="o", capsize=3, label=box)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set(xscale="log", xlabel="classes", ylabel="time / time of torch.softmax", ylim=(0, None))
    axes.set_title("box_constrained_softmax, one CPU thread, float32: lower is better")
    axes.legend(title="bounds that bind")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    table = []
    for count in THREADS:
        torch.set_num_threads(count)
        table += measure(arguments.rounds)
    machine = {
        "processor": processor(),
        "torch": torch.__version__,
        "rounds": arguments.rounds,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps({"machine": machine, "results": table}, indent=1) + "\n")
    plot(table, PLOT)


if __name__ == "__main__":
    main()
