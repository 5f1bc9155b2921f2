"""Measures startup and latency of the service: `python -m benchmarks.service [ROUNDS]`.

Each round measures, one after the other: `python -c "import torch, torchvision"`; the service from the start
of its process until it is ready; the latency of one image of a digit over HTTP with a single client; and
decoding and running the same image in this process.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import httpx
import torch

from benchmarks.overload import wait_until_ready
from benchmarks.serving.payloads import free_port
from boxcal.models.backends.digits import DigitLevels
from boxcal.models.digits_data import load_digits_split
from boxcal.models.inputs.decoding import decode
from boxcal.models.loading.specifications import load_backbone

REQUESTS = 300


def seconds(work: Callable[[], object]) -> float:
    """Time one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def bare_import() -> float:
    """Time a process that only imports torch and torchvision."""
    command = [sys.executable, "-c", "import torch, torchvision"]
    return seconds(lambda: subprocess.run(command, check=True))


def start_and_ask(image: bytes) -> tuple[float, float]:
    """Return the time from start until ready, and the median latency of an image."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        settings = {"BOXCAL_PORT": str(port), "BOXCAL_DATA_DIR": folder, "BOXCAL_MODEL": "digits"}
        began = time.perf_counter()
        command = [str(Path(sys.executable).with_name("boxcal")), "serve"]
        process = subprocess.Popen(command, env=os.environ | settings, stderr=subprocess.DEVNULL)
        try:
            wait_until_ready(process, port)
            ready = time.perf_counter() - began
            with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
                ask = partial(client.post, "/predict", content=image, headers={"content-type": "image/png"})
                answers = [seconds(ask) for _ in range(REQUESTS)]
        finally:
            process.terminate()
            process.wait()
    return ready, statistics.median(answers[50:])


def decode_and_run(image: bytes) -> float:
    """Return the median time to decode an image and run the backbone."""
    backbone = load_backbone("digits", device="cpu")
    read = partial(decode, preprocessing=DigitLevels(), max_pixels=10**6)
    return statistics.median(
        seconds(lambda: backbone(torch.from_numpy(read(image)[None]))) for _ in range(REQUESTS)
    )


def main(rounds: int) -> None:
    """Measure, print every round and the medians."""
    image = load_digits_split().test.png(0)
    rows = []
    for _ in range(rounds):
        bare, (ready, asked), worked = bare_import(), start_and_ask(image), decode_and_run(image)
        rows.append((ready - bare, asked * 1e3, worked * 1e3))
        print(
            f"imports {bare:.2f} s, ready {ready:.2f} s, {ready - bare:+.2f} s later; digit over HTTP "
            f"{asked * 1e3:.2f} ms, decode and forward pass {worked * 1e3:.2f} ms",
            flush=True,
        )
    later, asked, worked = (statistics.median(column) for column in zip(*rows, strict=True))
    print(
        f"median of {rounds} rounds: ready {later:+.2f} s after the bare imports (goal: at most 2.5 s); "
        f"a digit over HTTP {asked:.2f} ms (goal: at most 2 × {worked:.2f} + 3 = {2 * worked + 3:.2f} ms)"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
