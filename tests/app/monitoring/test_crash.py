"""`kill -9` at any moment of feedback: the evidence afterwards is that of a run without interruption."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.app.fitting.service import Service
from tests.app.monitoring.traffic import client_of, evidence, folded, predict, stream
from tests.app.waiting import until

BATCH = 50
LONGEST = 0.4
"""Seconds of feedback before a kill, at most."""

SETTINGS = {"auto_refit": "off", "model": "logits:10"}

Batches = list[list[dict[str, Any]]]


def batches(ids: list[str], count: int) -> Batches:
    """Labels of predictions, and of logits with a key, by turns."""
    logits, labels = stream(count, 1.3)
    items: list[dict[str, Any]] = []
    for n, true in enumerate(labels):
        item = {"id": ids[n]} if n % 2 else {"logits": logits[n].tolist(), "key": f"order {n}"}
        items.append(item | {"label": true})
    return [items[start : start + BATCH] for start in range(0, count, BATCH)]


def prepared(client: httpx.Client, count: int) -> Batches:
    logits, _ = stream(count, 1.3)
    ids = [own for start in range(0, count, 500) for own in predict(client, logits[start : start + 500])]
    until(lambda: client.get("/monitor").json()["log"]["rows"] >= count, 280)
    return batches(ids, count)


def give(client: httpx.Client, batch: list[dict[str, Any]]) -> int:
    answer: dict[str, Any] = client.post("/feedback", json={"items": batch}).raise_for_status().json()
    assert answer["accepted"] + answer["duplicates"] == len(batch), answer
    seq: int = answer["seq"]
    return seq


def give_until_killed(service: Service, every: Batches, done: int, seconds: float) -> int:
    """Give batches, the first ones again at the end, until the kill; returns how many were answered."""
    killer = threading.Timer(seconds, service.kill)
    killer.start()
    try:
        while True:
            give(service.client, every[done % len(every)])
            done += 1
    except httpx.TransportError:
        pass
    killer.join()
    return done


def run(folder: Path, kills: int, count: int) -> None:
    calm_settings: dict[str, Any] = {**SETTINGS}
    with client_of(folder / "calm", **calm_settings) as client:
        for batch in prepared(client, count):
            seq = give(client, batch)
        expected = folded(client, seq)
    rng = np.random.default_rng(0)
    with Service(folder / "killed", **SETTINGS) as service:
        every, done = prepared(service.client, count), 0
        for _ in range(kills):
            done = give_until_killed(service, every, done, rng.uniform(0.0, LONGEST))
            service.start()
        for batch in [*every[done:], every[-1]]:
            seq = give(service.client, batch)
        document = folded(service.client, seq)
        service.kill()
    assert document["labels"] == expected["labels"] == count
    assert evidence(document) == evidence(expected)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("kills", "count"), [(1, 1000), pytest.param(50, 20_000, marks=pytest.mark.long)])
def test_kills_change_no_evidence(tmp_path: Path, kills: int, count: int) -> None:
    run(tmp_path, kills, count)
