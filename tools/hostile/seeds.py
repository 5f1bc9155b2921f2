"""Valid requests of every route and content type, which the fuzzer damages and the soak sends as they are."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from boxcal.models.digits_data import load_digits_split
from tests.app.fitting.files import LABELS, LOGITS, compressed, parquet
from tests.app.fitting.test_images import archive as archive_of_images
from tests.app.fitting.validation_data import CONTENT_TYPE, form, multipart, npz
from tools.hostile.bodies import npy

JSON, NPY = "application/json", "application/x-npy"
OPTIONS = {
    "bounds": {"lower": {"3": 0.01}, "upper": [0.9] * 10}, "top_k": 3, "probabilities": True, "logits": True,
    "explain": True, "calibrator": 0, "timeout_ms": 2000,
}  # fmt: skip
QUERIES = (
    "",
    "?probabilities=true&top_k=2",
    "?upper=0.5&timeout_ms=1000",
    "?options=%7B%22logits%22:true%7D",
)
ENDLESS = "/monitor/events"
"""A stream that ends when the client leaves."""
DEFAULT_SECONDS = 5.0
"""Of a request that sets no timeout, as the service that is tested is configured."""
FIT_SECONDS = 30.0
"""For the check of a small upload, which has no timeout but its worker's."""


@dataclass(frozen=True, slots=True)
class Seed:
    """One valid request.

    Attributes
    ----------
    target
        Path and query.
    kind
        Content type; empty if there is no body.
    """

    method: str
    target: str
    kind: str = ""
    body: bytes = b""


def predictions() -> list[Seed]:
    """Requests of `/predict` and `/calibrate` in every content type."""
    digits = load_digits_split().test
    tensors = digits.levels[:3]
    images = {"image/png": digits.png(0), "image/jpeg": encoded("JPEG"), "image/webp": encoded("WEBP")}
    seeds = [
        Seed("POST", f"/predict{query}", kind, body) for kind, body in images.items() for query in QUERIES[:2]
    ]
    seeds += [
        Seed("POST", "/predict", "image/jpeg", encoded("JPEG", progressive=True)),
        Seed("POST", "/predict", "image/png", encoded("PNG", mode="RGBA")),
        Seed("POST", "/predict?top_k=10", NPY, npy(tensors)),
        Seed("POST", "/predict", NPY, npy(tensors[:1].astype(">f8"))),
        Seed("POST", "/predict", CONTENT_TYPE, predict_form(*images.values())),
        Seed("POST", "/predict", JSON, dumped({"inputs": [{"tensor": t.tolist()} for t in tensors]})),
        Seed("POST", "/predict", JSON, dumped({"inputs": [image_member(digits.png(1))], "options": OPTIONS})),
    ]
    for query in QUERIES:
        seeds.append(Seed("POST", f"/calibrate{query}", NPY, npy(LOGITS[:4])))
    seeds.append(Seed("POST", "/calibrate", JSON, dumped({"logits": LOGITS[:3].tolist()})))
    seeds.append(
        Seed("POST", "/calibrate", JSON, dumped({"logits": [LOGITS[0].tolist()], "options": OPTIONS}))
    )
    return seeds


def uploads(method: str = "uncalibrated") -> list[Seed]:
    """Requests of `/fit` with each kind of file; nothing is activated."""
    files = [
        npz(logits=LOGITS, labels=LABELS),
        compressed(logits=LOGITS, labels=LABELS, features=LOGITS[:, :4]),
        parquet(),
        archive_of_images(),
    ]
    return [
        Seed("POST", "/fit", CONTENT_TYPE, form(file, method=method, activate="never", budget_seconds="1"))
        for file in files
    ]


def of_document(document: Mapping[str, Any]) -> list[Seed]:
    """One request of every other operation of an OpenAPI document, with its example where it takes a body."""
    seeds = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            if path in ("/predict", "/calibrate", "/fit", ENDLESS):
                continue
            kind = next(iter(content), "")
            example = _example(content[kind]) if kind else None
            body = b"" if example is None else dumped(example)
            seeds.append(Seed(method.upper(), path, kind if body else "", body))
    return seeds


def _example(media: Mapping[str, Any]) -> Any:
    if "example" in media:
        return media["example"]
    examples = media.get("examples") or {"": {"value": {}}}
    return next(iter(examples.values()))["value"]


def predict_form(*files: bytes) -> bytes:
    """A form of `/predict` with these images and options."""
    parts = [(f'name="file"; filename="{place}"', file) for place, file in enumerate(files)]
    return multipart(*parts, ('name="options"', b'{"top_k": 2}'))


def image_member(image: bytes) -> dict[str, str]:
    """An image as a JSON input."""
    return {"image": base64.b64encode(image).decode()}


def encoded(kind: str, mode: str = "RGB", **options: Any) -> bytes:
    """A small image with some structure."""
    pixels = (np.arange(24 * 24 * len(mode)) * 7 % 256).astype(np.uint8).reshape(24, 24, len(mode))
    file = io.BytesIO()
    Image.fromarray(pixels, mode).save(file, kind, **options)
    return file.getvalue()


def dumped(document: Any) -> bytes:
    """A JSON document."""
    return json.dumps(document).encode()
