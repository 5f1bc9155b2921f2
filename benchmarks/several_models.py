"""Two models in one process: `python -m benchmarks.several_models [ROUNDS] [--shares A,B]`.

One service has `small` (torchvision's mobilenet_v3_small) and `large` (resnet18), with random weights. A
round measures each model alone and then both at once, with 64 requests under way for each, so that there is
always a queue; a request is one JPEG image. While both are loaded, another client activates calibrators of
`small` and checks that those of `large` stay. What a model has beside the other, as a part of its rate alone,
should be in proportion to its share, within 10 %. A rate also depends on what has no turns: decoding,
HTTP and the clients, which take more of the processor for a request of the small model.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import statistics
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.protocols import serving
from benchmarks.serving.payloads import JPEG, Request, free_port
from benchmarks.serving.running import run_part

MODELS = {"small": "torchvision:mobilenet_v3_small", "large": "torchvision:resnet18"}
CONNECTIONS = 64
IMAGES = 8
SECONDS, WARM_SECONDS = 4.0, 1.0
TOLERANCE = 0.1


def images() -> list[bytes]:
    """Make images of noise."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(IMAGES):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (224, 224, 3), dtype=np.uint8)).save(file, "jpeg")
        found.append(file.getvalue())
    return found


def settings(folder: Path, port: int, shares: tuple[float, float]) -> dict[str, str]:
    """Write the list of the models, and return the variables of the service."""
    tables = [
        f'[{name}]\nmodel = "{spec}"\nweights = "random"\ndevice = "cpu"\nshare = {share}\n'
        for (name, spec), share in zip(MODELS.items(), shares, strict=True)
    ]
    (file := folder / "models.toml").write_text("\n".join(tables))
    return {"BOXCAL_MODELS": str(file), "BOXCAL_PORT": str(port), "BOXCAL_DATA_DIR": str(folder / "data")}


def rate(port: int, model: str, bodies: list[bytes]) -> float:
    """Keep connections of one model busy, and return responses/s."""
    sent = [Request(f"/predict?model={model}", JPEG, body).encoded(port) for body in bodies]
    plan: dict[str, Any] = {
        "port": port,
        "requests": [base64.b64encode(request).decode() for request in sent],
        "phases": [
            {"name": name, "seconds": seconds, "connections": CONNECTIONS}
            for name, seconds in (("warm-up", WARM_SECONDS), ("saturation", SECONDS))
        ],
    }
    phase = run_part("load", plan=plan)[1]
    if set(phase["failures"]) - {"unanswered"}:  # at the end of the phase
        raise SystemExit(f"requests for {model} failed: {phase['failures']}")
    return float(len(phase["latencies"]) / phase["elapsed"])


def fit(http: httpx.Client) -> int:
    """Fit a calibrator for the small model, and return its version."""
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


def activate(http: httpx.Client, version: int, stop: threading.Event) -> int:
    """Activate calibrators of the small model in turns until stopped; those of the other model stay."""
    body = {"logits": [np.linspace(-3, 3, 1000).tolist()], "options": {"probabilities": True}}

    def other() -> Any:
        answer = http.post("/calibrate", params={"model": "large"}, json=body).json()
        return answer["calibrator"], answer["predictions"]

    before, count = other(), 0
    while not stop.wait(0.05):
        chosen = version if count % 2 == 0 else 0
        answer = http.post(f"/calibrators/{chosen}/activate", params={"model": "small"}).json()
        if answer["version"] != chosen or other() != before:
            raise SystemExit(f"activation {count} of small changed large: {answer}")
        count += 1
    history = http.get("/activations", params={"model": "large"}).json()["activations"]
    if history:
        raise SystemExit(f"large has activations: {history}")
    return count


def measure(port: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]], int]:
    """Return the rates of each model alone and beside the other, and how often calibrators were activated."""
    bodies, count = images(), 0
    alone: dict[str, list[float]] = {name: [] for name in MODELS}
    beside: dict[str, list[float]] = {name: [] for name in MODELS}
    with (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=400) as http,
        ThreadPoolExecutor(3) as pool,
    ):
        version = fit(http)
        for _ in range(rounds):
            for name, rates in alone.items():
                rates.append(rate(port, name, bodies))
            stop = threading.Event()
            activating = pool.submit(activate, http, version, stop)
            both = {name: pool.submit(rate, port, name, bodies) for name in MODELS}
            for name, measured in both.items():
                beside[name].append(measured.result())
            stop.set()
            count += activating.result()
    return alone, beside, count


def main() -> None:
    """Measure, print the table, and fail if a model has less or more than its share."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rounds", type=int, nargs="?", default=3)
    parser.add_argument("--shares", default="1,1")
    options = parser.parse_args()
    first, second = map(float, options.shares.split(","))
    port = free_port()
    command = [sys.executable, "-c", "from boxcal.app.cli import main; main()", "serve"]
    with tempfile.TemporaryDirectory() as folder:
        environment = settings(Path(folder), port, (first, second))
        with serving(command, environment, f"{port}/health/ready"):
            alone, beside, count = measure(port, options.rounds)
    print(f"shares {first:g} : {second:g}; {count} activations of small, none of which changed large")
    parts = {
        name: statistics.median(x / y for x, y in zip(rates, alone[name], strict=True))
        for name, rates in beside.items()
    }
    together = sum(parts.values())
    print("model | alone, 1/s | beside the other, 1/s | part of its rate | share of both | share set")
    missed = []
    for (name, part), share in zip(parts.items(), (first, second), strict=True):
        got, wanted = part / together, share / (first + second)
        rates = f"{statistics.median(alone[name]):.1f} | {statistics.median(beside[name]):.1f}"
        print(f"{name} | {rates} | {part:.3f} | {got:.3f} | {wanted:.3f}")
        if abs(got / wanted - 1) > TOLERANCE:
            missed.append(name)
    print(f"together {together:.3f} of what one model has alone")
    print(json.dumps({"alone": alone, "beside": beside, "cores": os.cpu_count()}))
    if missed:
        raise SystemExit(f"not within {TOLERANCE:.0%} of the share: {', '.join(missed)}")


if __name__ == "__main__":
    main()
