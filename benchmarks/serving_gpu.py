"""Compares the service with the network alone on a GPU: ViT-B/16 in bfloat16, tensors and JPEG.

    python -m benchmarks.serving_gpu

It measures, in images/s: the network on a batch of 64 in device memory; the backbone from host memory, as the
service calls it; the service with `.npy` batches over loopback; the service with JPEG images, and the
throughput of JPEG decoding on this machine. Weights are random, which does not change the time.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.serving.contestants import OURS, Contestant, Launch, Model
from benchmarks.serving.limits import rate
from benchmarks.serving.load import Phase
from benchmarks.serving.payloads import Request, for_boxcal, read_images
from benchmarks.serving.peers.work import prepare
from benchmarks.serving.running import run_part, serving
from boxcal.models.loading.specifications import load_backbone

SPEC, PRECISION, BATCH, SIDE = "torchvision:vit_b_16", "bfloat16", 64, 224
SAMPLES_A_REQUEST = 16
CONNECTIONS = 32
SECONDS = 10.0


def _launch(python: Path, model: Model, port: int, folder: Path) -> Launch:
    settings = {
        "BOXCAL_MODEL": SPEC,
        "BOXCAL_WEIGHTS": "random",
        "BOXCAL_DEVICE": "cuda",
        "BOXCAL_PRECISION": PRECISION,
        "BOXCAL_MAX_BATCH_SIZE": str(BATCH),
        "BOXCAL_DECODE_THREADS": str(os.cpu_count() or 1),
        "BOXCAL_PORT": str(port),
        "BOXCAL_DATA_DIR": str(folder / "data"),
    }
    return Launch([str(Path(sys.executable).with_name("boxcal")), "serve"], settings)


def bare_network(seconds: float) -> float:
    """Return images/s of the network, with its input in device memory."""
    from torchvision.models import vit_b_16  # noqa: PLC0415 - only where there is a GPU

    network = vit_b_16(weights=None).to("cuda", torch.bfloat16).eval()
    batch = torch.randn(BATCH, 3, SIDE, SIDE, device="cuda", dtype=torch.bfloat16)

    def step(_: int) -> None:
        with torch.inference_mode():
            network(batch)
        torch.cuda.synchronize()

    for i in range(10):
        step(i)
    return BATCH * rate(step, seconds)


def backbone(seconds: float) -> float:
    """Return images/s of the backbone, from host memory to logits in host memory."""
    model = load_backbone(SPEC, weights="random", device="cuda", precision=PRECISION)
    model.warm_up([BATCH])
    batch = torch.randn(BATCH, *model.input_shape)
    return BATCH * rate(lambda _: model(batch), seconds)


def decoding(images: list[bytes], seconds: float) -> float:
    """Return how many JPEG files/s all cores decode and resize to 224 × 224."""
    cores = os.cpu_count() or 1
    stop = time.perf_counter() + seconds

    def work(offset: int) -> int:
        count = 0
        while time.perf_counter() < stop:
            prepare(Image.open(io.BytesIO(images[(offset + count) % len(images)])))
            count += 1
        return count

    with ThreadPoolExecutor(cores) as pool:
        return sum(pool.map(work, range(cores))) / seconds


def some_images(folder: Path | None) -> list[bytes]:
    """Return the JPEG files of a folder, or 500 × 375 images of smooth noise of the size of photos."""
    if folder is not None:
        return read_images(folder)
    images = []
    for seed in range(16):
        coarse = np.random.default_rng(seed).integers(0, 256, (94, 125, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=90)
        images.append(buffer.getvalue())
    return images


def service(images: list[bytes], seconds: float) -> dict[str, Any]:
    """Saturate the service with tensors, then with JPEG; return both rates, p99 and failures."""
    contestant = Contestant(OURS, (), _launch, "/health/ready", for_boxcal)
    tensor = io.BytesIO()
    np.save(
        tensor, np.random.default_rng(0).normal(size=(SAMPLES_A_REQUEST, 3, SIDE, SIDE)).astype(np.float32)
    )
    kinds = {
        "tensors": (SAMPLES_A_REQUEST, [Request("/predict", "application/x-npy", tensor.getvalue())]),
        "jpeg": (1, [for_boxcal("images", image) for image in images]),
    }
    told: dict[str, Any] = {}
    nothing = Model(Path(), Path())
    with serving(contestant, Path(sys.executable), nothing, "images") as server:
        for kind, (samples, requests) in kinds.items():
            connections = CONNECTIONS if samples > 1 else 4 * BATCH
            phases = [Phase("warm-up", 3.0, connections), Phase("saturation", seconds, connections)]
            encoded = [base64.b64encode(request.encoded(server.port)).decode() for request in requests]
            plan = {"port": server.port, "requests": encoded, "phases": [asdict(phase) for phase in phases]}
            outcome = run_part("load", plan=plan)[1]
            told[kind] = {
                "images_per_second": samples * len(outcome["latencies"]) / outcome["elapsed"],
                "p99_ms": float(np.percentile(outcome["latencies"], 99)) * 1000,
                "failures": outcome["failures"],
            }
    return told


def main() -> None:
    """Measure, print the results as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_gpu", description=__doc__)
    parser.add_argument("--images", type=Path, default=os.environ.get("BENCH_SERVING_IMAGES"))
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.serving_gpu requires an NVIDIA GPU, and torch finds none.")
    images = some_images(options.images)
    bare = bare_network(options.seconds)
    through = backbone(options.seconds)
    served = service(images, options.seconds)
    figures = {
        "device": torch.cuda.get_device_name(),
        "cores": os.cpu_count(),
        "bare_network": bare,
        "backbone_from_host": through,
        "service": served,
        "service_of_bare": served["tensors"]["images_per_second"] / bare,
        "jpeg_decoding": decoding(images, options.seconds / 2),
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
