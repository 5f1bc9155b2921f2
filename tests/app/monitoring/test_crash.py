"""`kill -9` at any moment of feedback: the evidence afterwards is that of a run without interruption."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.app.fitting.service import Service
from tests.app.monitoring.traffic import evidence, folded, predict, stream

BATCH = 100
LONGEST = 0.8
"""Seconds of feedback before a kill, at most."""

Batches = list[list[dict[str, Any]]]


def batches(ids: list[str], count: int) -> Batches:
    """Labels of predictions, and of logits with a key, by turns."""
    logits, labels = stream(count, 1.3)
    items: list[dict[str, Any]] = []
    for n, true in enumerate(labels):
        item = {"id": ids[n]} if n % 2 else {"logits": logits[n].tolist(), "key": f"order {n}"}
        items.append(item | {"label": true})
    return [items[start : start + BATCH] for start in range(0, count, BATCH)]


def prepared(service: Service, count: int) -> Batches:
    """Make the predictions, and wait until they are stored."""
    logits, _ = stream(count, 1.3)
    ids = [
        own for start in range(0, count, 500) for own in predict(service.client, logits[start : start + 500])
    ]
    while service.client.get("/monitor").json()["log"]["rows"] < count:
        time.sleep(0.05)
    return batches(ids, count)


def give_until_killed(service: Service, left: Batches, seconds: float) -> Batches:
    """Give batches in their order until the service is killed; returns those that were not answered."""
    killer = threading.Timer(seconds, service.kill)
    killer.start()
    try:
        while left:
            answer = service.client.post("/feedback", json={"items": left[0]})
            assert answer.is_success, answer.text
            counted = answer.json()
            assert counted["accepted"] + counted["duplicates"] == len(left[0]), counted
            left = left[1:]
    except httpx.TransportError:
        pass
    killer.join()
    return left


def run(folder: Path, kills: int, count: int) -> None:
    settings = {"auto_refit": "off", "model": "logits:10"}
    with Service(folder / "calm", **settings) as calm:
        for batch in prepared(calm, count):
            seq = calm.client.post("/feedback", json={"items": batch}).raise_for_status().json()["seq"]
        expected = folded(calm.client, seq)
    rng = np.random.default_rng(0)
    service = Service(folder / "killed", **settings)
    with service:
        every = left = prepared(service, count)
        for _ in range(kills):
            left = give_until_killed(service, left, rng.uniform(0.0, LONGEST))
            service.start()
        for batch in [*left, every[-1]]:
            seq = service.client.post("/feedback", json={"items": batch}).raise_for_status().json()["seq"]
        document = folded(service.client, seq)
    assert document["labels"] == expected["labels"] == count
    assert evidence(document) == evidence(expected)


def test_one_kill(tmp_path: Path) -> None:
    run(tmp_path, 1, 1000)


@pytest.mark.long
def test_fifty_kills(tmp_path: Path) -> None:
    run(tmp_path, 50, 20_000)
