"""Several models in one process: `python -m benchmarks.several_models [ROUNDS] [--shares A,B]`.

One service has `small` and `twin` (torchvision's mobilenet_v3_small) and `large` (resnet18), with random
weights. A round measures `small` and `large` alone, and then two models at once: the twins with equal load,
the twins with four times the requests under way for one of them, and `small` beside `large`. A request is one
JPEG image. While two are loaded, another client activates calibrators of `small` and checks that those of the
other model stay.

What is shared is the time of the device, read from `boxcal_device_seconds_total` between readings at which
both models have a queue. Each model must have its share of it, within 10 %. Equal models with equal load
and equal shares must also have it of the responses. Other rates may differ: a longer queue makes larger
batches, which take less time for a sample, and decoding, HTTP and the clients have no turns.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import re
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.protocols import serving
from benchmarks.serving.payloads import JPEG, Request, free_port
from benchmarks.serving.running import run_part

MODELS = {
    "small": "torchvision:mobilenet_v3_small",
    "twin": "torchvision:mobilenet_v3_small",
    "large": "torchvision:resnet18",
}
PAIRS = ({"small": 64, "twin": 64}, {"small": 64, "twin": 16}, {"small": 64, "large": 64})
"""Models that are loaded at once, and how many requests of each are under way."""
IMAGES = 8
SECONDS, WARM_SECONDS = 5.0, 1.0
READ_SECONDS, ACTIVATE_SECONDS = 0.25, 0.25
QUEUED = 4
"""A model with so many samples has a queue: two passes run, and two samples more are decoded or wait."""
TOLERANCE = 0.1
Reading = dict[str, dict[str, float]]
SAMPLE = re.compile(r'^boxcal_(device_seconds_total|queue_samples)\{model="(\w+)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class Both:
    """What two models had beside each other.

    Attributes
    ----------
    rates
        Responses/s of each.
    device
        Seconds of its passes while both had a queue.
    seconds
        How long both had one.
    """

    rates: dict[str, float]
    device: dict[str, float]
    seconds: float


def images() -> list[bytes]:
    """Make images of noise."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(IMAGES):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (224, 224, 3), dtype=np.uint8)).save(file, "jpeg")
        found.append(file.getvalue())
    return found


def settings(folder: Path, port: int, shares: Mapping[str, float]) -> dict[str, str]:
    """Write the list of the models, and return the variables of the service."""
    tables = [
        f'[{name}]\nmodel = "{spec}"\nweights = "random"\ndevice = "cpu"\nshare = {shares[name]}\n'
        for name, spec in MODELS.items()
    ]
    (file := folder / "models.toml").write_text("\n".join(tables))
    return {"BOXCAL_MODELS": str(file), "BOXCAL_PORT": str(port), "BOXCAL_DATA_DIR": str(folder / "data")}


def rate(port: int, model: str, connections: int, bodies: list[bytes]) -> float:
    """Keep connections of one model busy, and return responses/s."""
    sent = [Request(f"/predict?model={model}", JPEG, body).encoded(port) for body in bodies]
    plan: dict[str, Any] = {
        "port": port,
        "requests": [base64.b64encode(request).decode() for request in sent],
        "phases": [
            {"name": name, "seconds": seconds, "connections": connections}
            for name, seconds in (("warm-up", WARM_SECONDS), ("saturation", SECONDS))
        ],
    }
    phase = run_part("load", plan=plan)[1]
    if set(phase["failures"]) - {"unanswered"}:  # at the end of the phase
        raise SystemExit(f"requests for {model} failed: {phase['failures']}")
    return float(len(phase["latencies"]) / phase["elapsed"])


def watch(http: httpx.Client, stop: threading.Event) -> list[Reading]:
    """Read the metrics of all models until stopped."""
    readings = []
    while not stop.wait(READ_SECONDS):
        reading: Reading = {"device_seconds_total": {}, "queue_samples": {}, "at": {"": time.perf_counter()}}
        for name, model, value in SAMPLE.findall(http.get("/metrics").text):
            reading[name][model] = float(value)
        readings.append(reading)
    return readings


def while_queued(readings: list[Reading], models: list[str]) -> tuple[dict[str, float], float]:
    """Return the device seconds of each model between readings at which all had a queue, and for how long."""
    used, seconds = dict.fromkeys(models, 0.0), 0.0
    for one, other in pairwise(readings):
        if all(reading["queue_samples"][name] >= QUEUED for reading in (one, other) for name in models):
            seconds += other["at"][""] - one["at"][""]
            for name in models:
                used[name] += other["device_seconds_total"][name] - one["device_seconds_total"][name]
    return used, seconds


def fit(http: httpx.Client) -> int:
    """Fit a calibrator for the model `small`, and return its version."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 1000, 2000)
    logits = rng.normal(0, 2, (2000, 1000))
    logits[np.arange(2000), labels] += 6
    file = io.BytesIO()
    np.savez(file, logits=logits.astype(np.float32), labels=labels)
    form = {"method": "ts", "activate": "never"}
    query = {"model": "small", "wait": "300"}
    answer = http.post("/fit", params=query, data=form, files={"file": file.getvalue()}).json()
    if answer["state"] != "succeeded":
        raise SystemExit(f"the fit failed: {answer}")
    return int(answer["calibrator"])


def activate(http: httpx.Client, version: int, other: str, stop: threading.Event) -> int:
    """Activate calibrators of `small` in turns until stopped; those of the other model stay."""
    body = {"logits": [np.linspace(-3, 3, 1000).tolist()], "options": {"probabilities": True}}

    def answer_of_other() -> Any:
        answer = http.post("/calibrate", params={"model": other}, json=body).json()
        return answer["calibrator"], answer["predictions"]

    before, count = answer_of_other(), 0
    while not stop.wait(ACTIVATE_SECONDS):
        chosen = version if count % 2 == 0 else 0
        answer = http.post(f"/calibrators/{chosen}/activate", params={"model": "small"}).json()
        if answer["version"] != chosen or answer_of_other() != before:
            raise SystemExit(f"activation {count} of small changed {other}: {answer}")
        count += 1
    history = http.get("/activations", params={"model": other}).json()["activations"]
    if history:
        raise SystemExit(f"{other} has activations: {history}")
    return count


def together(
    http: httpx.Client, pair: Mapping[str, int], version: int, bodies: list[bytes]
) -> tuple[Both, int]:
    """Load two models at once; returns what each had, and how often calibrators were activated."""
    port, stop = http.base_url.port or 0, threading.Event()
    with ThreadPoolExecutor(4) as pool:
        activating = pool.submit(activate, http, version, list(pair)[1], stop)
        watching = pool.submit(watch, http, stop)
        loads = {name: pool.submit(rate, port, name, count, bodies) for name, count in pair.items()}
        try:
            rates = {name: load.result() for name, load in loads.items()}
        finally:
            stop.set()
        device, seconds = while_queued(watching.result(), list(pair))
        if not all(device.values()):
            raise SystemExit(f"{' and '.join(pair)} had no queue at the same time; is the machine busy?")
        return Both(rates, device, seconds), activating.result()


def measure(port: int, rounds: int) -> tuple[dict[str, list[float]], list[list[Both]], int]:
    """Return the rates of each model alone, those of the pairs, and how often calibrators were activated."""
    bodies, count = images(), 0
    alone: dict[str, list[float]] = {"small": [], "large": []}
    both: list[list[Both]] = [[] for _ in PAIRS]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=400) as http:
        version = fit(http)
        for _ in range(rounds):
            for name, rates in alone.items():
                rates.append(rate(port, name, 64, bodies))
            for pair, measured in zip(PAIRS, both, strict=True):
                found, activations = together(http, pair, version, bodies)
                measured.append(found)
                count += activations
    return alone, both, count


def parts(amounts: list[dict[str, float]]) -> dict[str, float]:
    """Return the median part that each model has of the sum."""
    names = amounts[0]
    return {name: statistics.median(one[name] / sum(one.values()) for one in amounts) for name in names}


def main() -> None:
    """Measure, print the table, and fail if a model has less or more than its share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    parser.add_argument("--shares", default="1,1", help="of `small`, and of the model beside it")
    options = parser.parse_args()
    first, second = map(float, options.shares.split(","))
    shares = {name: first if name == "small" else second for name in MODELS}
    port = free_port()
    command = [sys.executable, "-c", "from boxcal.app.cli import main; main()", "serve"]
    with tempfile.TemporaryDirectory() as folder:
        environment = settings(Path(folder), port, shares)
        with serving(command, environment, f"{port}/health/ready"):
            alone, both, count = measure(port, options.rounds)
    print(f"{count} activations of small, none of which changed the other model")
    print("model | under way | alone, 1/s | both, 1/s | part of the rates | share of the device | share set")
    missed = []
    for pair, measured in zip(PAIRS, both, strict=True):
        rates, device = parts([one.rates for one in measured]), parts([one.device for one in measured])
        for name, connections in pair.items():
            wanted = shares[name] / sum(shares[each] for each in pair)
            own = statistics.median(alone["small" if name == "twin" else name])
            beside = statistics.median(one.rates[name] for one in measured)
            shown = f"{rates[name]:.3f} | {device[name]:.3f} | {wanted:.3f}"
            print(f"{name} | {connections} | {own:.1f} | {beside:.1f} | {shown}")
            is_equal = pair == PAIRS[0] and first == second
            compared = [device[name], rates[name]] if is_equal else [device[name]]
            if any(abs(got / wanted - 1) > TOLERANCE for got in compared):
                missed.append(f"{name} in {' and '.join(pair)}")
        print(f"both had a queue for {sum(one.seconds for one in measured):.1f} s")
    recorded = [[asdict(one) for one in measured] for measured in both]
    print(json.dumps({"alone": alone, "both": recorded, "cores": os.cpu_count()}))
    if missed:
        raise SystemExit(f"not within {TOLERANCE:.0%} of the share: {', '.join(missed)}")


if __name__ == "__main__":
    main()
