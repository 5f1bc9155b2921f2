"""Measures the forward pass of an ONNX file on one thread: `python -m benchmarks.forward FILE [ROUNDS]`.

Each round starts one process after the other: onnxruntime with its defaults, the backbone with normal pages,
and the backbone with huge pages, as in `boxcal serve`. Prints the minimum time per sample in milliseconds, of
each round and of all rounds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import onnxruntime
import torch

from boxcal.models.loading.specifications import load_backbone

BATCHES = (1, 4)
SECONDS = 4.0
HUGE = "glibc.malloc.hugetlb"
WAYS = {
    "onnxruntime's defaults": ("plain", f"{HUGE}=0"),
    "boxcal, normal pages": ("boxcal", f"{HUGE}=0"),
    "boxcal, huge pages": ("boxcal", f"{HUGE}=1"),
}


def plain(path: Path) -> Callable[[torch.Tensor], object]:
    """Open a session with default options and one thread."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return lambda batch: session.run(None, {session.get_inputs()[0].name: batch.numpy()})


def least_milliseconds(forward: Callable[[torch.Tensor], object], batch: torch.Tensor) -> float:
    """Run it repeatedly for some seconds, at least eight times; return the minimum time per sample."""
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(times) < 8 or time.perf_counter() < end:
        began = time.perf_counter()
        forward(batch)
        times.append(time.perf_counter() - began)
    return min(times) / len(batch) * 1e3


def measure(way: str, path: Path) -> None:
    """Print the time per sample for each batch size. Runs in a process of its own."""
    backbone = load_backbone(f"onnx:{path}", device="cpu")
    forward = partial(backbone, alone=False) if way == "boxcal" else plain(path)
    batches = (torch.rand(size, *backbone.input_shape) for size in BATCHES)
    print(*(least_milliseconds(forward, batch) for batch in batches))


def main(path: Path, rounds: int) -> None:
    """Run the rounds, print one line per variant, then the minima of all rounds."""
    found: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    for _ in range(rounds):
        for name, (way, tunables) in WAYS.items():
            command = [sys.executable, "-m", "benchmarks.forward", way, str(path)]
            environment = os.environ | {"GLIBC_TUNABLES": tunables}
            answer = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
            found[name].append([float(word) for word in answer.stdout.split()])
            print(name, *(f"{value:.2f}" for value in found[name][-1]), flush=True)
    for name, measured in found.items():
        of_batches = zip(BATCHES, zip(*measured, strict=True), strict=True)
        print(f"{name}:", ", ".join(f"batch of {size} {min(values):.2f}" for size, values in of_batches))


if __name__ == "__main__":
    if sys.argv[1] in {"plain", "boxcal"}:
        measure(sys.argv[1], Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5)
