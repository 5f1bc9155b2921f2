"""The same request in the format of each server, as bytes for a socket."""

from __future__ import annotations

import base64
import json
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

JPEG = "image/jpeg"
JSON = "application/json"
CLASSES = 1000


@dataclass(frozen=True)
class Request:
    """A POST request: path with query, media type, body and further headers."""

    path: str
    media_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()

    def encoded(self, port: int) -> bytes:
        """Return the bytes of HTTP/1.1 on a connection that stays open."""
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
            f"Content-Type: {self.media_type}\r\nContent-Length: {len(self.body)}\r\n"
        )
        more = "".join(f"{name}: {value}\r\n" for name, value in self.headers)
        return f"{head}{more}\r\n".encode() + self.body


def free_port() -> int:
    """Return a port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def read_images(folder: Path) -> list[bytes]:
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in (".jpg", ".jpeg"))
    if not files:
        raise SystemExit(f"{folder} holds no .jpg or .jpeg file")
    return [path.read_bytes() for path in files]


def random_logits(count: int, seed: int = 0) -> list[bytes]:
    """Return `count` JSON documents `{"logits": [[1000 numbers]]}`."""
    rows = np.random.default_rng(seed).normal(0, 4, (count, CLASSES)).round(6)
    return [json.dumps({"logits": [row.tolist()]}).encode() for row in rows]


def for_boxcal(task: str, body: bytes) -> Request:
    """`/predict` with a raw image, or `/calibrate` with all probabilities asked for."""
    if task == "images":
        return Request("/predict?top_k=5", JPEG, body)
    asked = body.rstrip()[:-1] + b', "options": {"probabilities": true}}'
    return Request("/calibrate", JSON, asked)


def raw(task: str, body: bytes) -> Request:
    """Send the body unchanged to the path with the name of the task."""
    return Request(f"/{task}", JPEG if task == "images" else JSON, body)


def raw_to(path: str, media_type: str = "application/octet-stream") -> Callable[[str, bytes], Request]:
    """Send the body unchanged, as binary data, to the only path of the server."""
    return lambda task, body: Request(path, media_type, body)


def open_inference(task: str, body: bytes) -> Request:
    """Wrap the body in the Open Inference Protocol's JSON."""
    if task == "images":
        data: list[str] | list[float] = [base64.b64encode(body).decode()]
        tensor = {"name": "image", "shape": [1], "datatype": "BYTES", "data": data}
    else:
        data = json.loads(body)["logits"][0]
        tensor = {"name": "logits", "shape": [1, len(data)], "datatype": "FP64", "data": data}
    return Request("/v2/models/bench/infer", JSON, json.dumps({"inputs": [tensor]}).encode())


def read_answer(task: str, document: Any) -> list[float]:
    """Return the indices of the top 5, or the 1000 probabilities, from the JSON of any server."""
    if isinstance(document, list):
        first: list[float] = document[0]
        return first
    if "outputs" in document:
        data: list[float] = document["outputs"][0]["data"]
        return data
    if "predictions" in document:
        document = document["predictions"][0]
    if task == "images":
        return [each["index"] for each in document["top"]]
    row = document["probabilities"]
    return list(row[0] if isinstance(row[0], list) else row)
