"""Measures the throughput of the machine without a server, in a separate process.

    python -m benchmarks.serving.limits images|logits SECONDS PLAN.json RESULT.json

The plan contains the model and the bodies. For images the limit is the fastest of several loops that decode
and run the model on all cores, with sessions like those of the other servers. Also measured: the model
without decoding, and the same loop with sessions like those of the service. For logits the limit is one
thread that parses, computes softmax and serialises.
"""

from __future__ import annotations

import base64
import io
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.serving.peers.work import Array, Classifier, prepare, softmax_json
from boxcal.models.backends.onnx_file import OnnxFile

CORES = os.cpu_count() or 1
BATCHES = (1, 8, 32)


def rate(step: Callable[[int], object], seconds: float) -> float:
    """Return calls/s of `step(i)`, after one call that is not measured."""
    step(0)
    count, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < seconds:
        step(count)
        count += 1
    return count / elapsed


def _image_rate(bodies: list[bytes], offset: int, seconds: float, as_served: bool) -> float:
    session = None
    if as_served:
        session = OnnxFile(Path(os.environ["BENCH_MODEL"])).session(["CPUExecutionProvider"], threads=1)
    classifier = Classifier(threads=1, session=session)
    return rate(lambda i: classifier.classify(bodies[(i + offset) % len(bodies)]), seconds)


def _together(pool: Executor, bodies: list[bytes], seconds: float, *, as_served: bool = False) -> float:
    offsets = [core * len(bodies) // CORES for core in range(CORES)]
    return sum(pool.map(_image_rate, [bodies] * CORES, offsets, [seconds] * CORES, [as_served] * CORES))


def _run_batch(classifier: Classifier, batch: Array, _: int) -> None:
    classifier.logits(batch)


def images(bodies: list[bytes], seconds: float) -> dict[str, float]:
    with ThreadPoolExecutor(CORES) as threads:
        in_threads = _together(threads, bodies, seconds)
    # Processes share no interpreter lock and should be fastest; the fastest variant is the limit.
    with ProcessPoolExecutor(CORES, mp_context=multiprocessing.get_context("spawn")) as processes:
        in_processes = _together(processes, bodies, seconds)
    classifier = Classifier(threads=CORES)
    tensor = prepare(Image.open(io.BytesIO(bodies[0])))
    batches = [np.repeat(tensor[None], size, axis=0) for size in BATCHES]
    in_batches = max(
        len(batch) * rate(partial(_run_batch, classifier, batch), seconds / len(BATCHES)) for batch in batches
    )
    return {
        "decode_and_model_in_threads": in_threads,
        "decode_and_model_in_processes": in_processes,
        "model_in_batches": in_batches,
        "decode_and_model_in_sessions_of_the_service": images_as_served(bodies, seconds),
        "limit": max(in_threads, in_processes),
    }


def images_as_served(bodies: list[bytes], seconds: float) -> float:
    """Return the rate of a process per core with sessions like those of the service, in images/s."""
    with ProcessPoolExecutor(CORES, mp_context=multiprocessing.get_context("spawn")) as processes:
        return _together(processes, bodies, seconds, as_served=True)


def logits(bodies: list[bytes], seconds: float) -> dict[str, float]:
    return {"limit": rate(lambda i: softmax_json(bodies[i % len(bodies)]), seconds)}


def main(task: str, seconds: float, plan: Path, result: Path) -> None:
    asked = json.loads(plan.read_text())
    os.environ["BENCH_MODEL"] = asked["model"]
    bodies = [base64.b64decode(body) for body in asked["bodies"]]
    measured = images(bodies, seconds) if task == "images" else logits(bodies, seconds)
    result.write_text(json.dumps(measured))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
