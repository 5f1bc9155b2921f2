"""Simulated traffic of ten classes: logits, and labels drawn from their softmax at a temperature."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from tests.app.running import running

CLASSES = 10


def stream(count: int, temperature: float = 1.0, seed: int = 0) -> tuple[NDArray[np.float64], list[int]]:
    """Logits (N, 10) and labels; with a temperature above 1 the softmax of the logits is overconfident."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (count, CLASSES)).astype(np.float16).astype(np.float64)
    labels = (logits / temperature + rng.gumbel(size=logits.shape)).argmax(1)
    return logits, labels.tolist()


@contextmanager
def client_of(data_dir: Path, **settings: Any) -> Iterator[httpx.Client]:
    """Run a service, and give a client of it."""
    with running(data_dir, **settings) as service, httpx.Client(base_url=service.url, timeout=280) as client:
        yield client


def predict(client: httpx.Client, logits: NDArray[np.float64]) -> list[str]:
    body = {"logits": logits.tolist(), "options": {"feedback": True, "top_k": 1}}
    answer = client.post("/calibrate", json=body).raise_for_status().json()
    return [prediction["id"] for prediction in answer["predictions"]]


def label(client: httpx.Client, ids: list[str], labels: list[int]) -> dict[str, Any]:
    items = [{"id": own, "label": true} for own, true in zip(ids, labels, strict=True)]
    answer: dict[str, Any] = client.post("/feedback", json={"items": items}).raise_for_status().json()
    return answer


def play(client: httpx.Client, logits: NDArray[np.float64], labels: list[int], step: int = 500) -> int:
    seq = 0
    for start in range(0, len(labels), step):
        ids = predict(client, logits[start : start + step])
        seq = label(client, ids, labels[start : start + step])["seq"]
    return seq


def folded(client: httpx.Client, seq: int, seconds: float = 280.0) -> dict[str, Any]:
    """Wait until the monitor has folded the log up to a number, and give its document."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        document: dict[str, Any] = client.get("/monitor").raise_for_status().json()
        if document["seq"] >= seq:
            return document
        time.sleep(0.02)
    raise AssertionError(f"the monitor is at {document['seq']}, not at {seq}")


def evidence(document: dict[str, Any]) -> list[float]:
    return [document["alarms"][name]["log_evidence"] for name in ("strict", "material")]
