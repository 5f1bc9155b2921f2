"""Measures memory under mixed request sizes: `python -m benchmarks.memory [MINUTES] [--rate 3]`.

One client sends, on a fixed schedule and in random order, JPEG and PNG images with sides of 40 to 1200
pixels, tensor batches of 1 to 48 samples, one to hundreds of rows of logits, invalid images, and timeouts
that are too short. It prints the resident memory (RSS) of the service at the start and twelve times later,
after half a second without requests. The first quarter fills caches and allocators; the result is the growth
from the median of the second quarter to that of the last.
"""

from __future__ import annotations

import argparse
import io
import statistics
import time

import httpx
import numpy as np
from PIL import Image

from benchmarks.serving.running import service

Request = tuple[str, bytes, str]
READINGS = 12
CLASSES = 1000


def encoded(rng: np.random.Generator, side: int, kind: str) -> bytes:
    coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
    stream = io.BytesIO()
    coarse.resize((side, max(40, side * 3 // 4)), Image.Resampling.BICUBIC).save(stream, kind)
    return stream.getvalue()


def array(values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> bytes:
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def requests(seed: int) -> list[Request]:
    """Return the requests that are sent repeatedly: path with query, body, media type."""
    rng = np.random.default_rng(seed)
    npy = "application/x-npy"
    made = [
        ("/predict", encoded(rng, side, kind), f"image/{kind.lower()}")
        for side in (40, 150, 333, 600, 1200)
        for kind in ("JPEG", "PNG")
    ]
    made += [
        ("/predict?upper=0.5", array(rng.random((size, 3, 224, 224), dtype=np.float32)), npy)
        for size in (1, 3, 8, 20, 48)
    ]
    made += [
        ("/calibrate?probabilities=true", array(rng.normal(size=(rows, CLASSES)).astype(np.float32)), npy)
        for rows in (1, 7, 100, 400)
    ]
    made += [("/predict", b"no image at all", "image/jpeg")]
    made += [("/predict?timeout_ms=0.01", encoded(rng, 333, "JPEG"), "image/jpeg")]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", type=float, nargs="?", default=60.0)
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--model", default="torchvision:mobilenet_v3_small")
    options = parser.parse_args()
    rng = np.random.default_rng(1)
    made = requests(0)
    statuses: dict[int, int] = {}
    readings: list[float] = []
    with (
        service(model=options.model, weights="random") as (port, process),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        began = due = time.monotonic()
        for reading in range(READINGS + 1):
            until = began + options.minutes * 60 * reading / READINGS
            while due < until:
                time.sleep(max(0.0, due - time.monotonic()))
                path, body, media_type = made[int(rng.integers(len(made)))]
                status = client.post(path, content=body, headers={"content-type": media_type}).status_code
                statuses[status] = statuses.get(status, 0) + 1
                due += 1 / options.rate
            time.sleep(0.5)
            readings.append(process.memory_info().rss / 2**20)
            minutes = (time.monotonic() - began) / 60
            print(f"{minutes:5.1f} min: {readings[-1]:.0f} MB, answers {statuses}", flush=True)
    quarter = READINGS // 4
    second, last = (
        statistics.median(part) for part in (readings[quarter : 2 * quarter], readings[-quarter:])
    )
    print(
        f"{sum(statuses.values())} requests in {options.minutes:g} minutes: {second:.0f} MB in the second "
        f"quarter, {last:.0f} MB in the last ({(last / second - 1) * 100:+.1f} %)"
    )


if __name__ == "__main__":
    main()
