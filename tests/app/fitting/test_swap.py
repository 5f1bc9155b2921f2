"""Activating and rolling back under constant load: nobody fails, and every answer is its version's own."""

from __future__ import annotations

import threading
import time
from typing import Any

import httpx
import numpy as np
import torch

from boxcal.calibrators import Calibrator
from boxcal.models.digits_data import load_digits_split
from tests.app.fitting.service import Service
from tests.app.fitting.validation_data import overconfident, validation_npz

SWAPS = 200
CLIENTS = 4
LOGITS, _ = overconfident(3, seed=3)


class Load:
    """A client that never pauses; keeps every answer."""

    def __init__(self, url: str, *, images: bool) -> None:
        self._url = url
        self._images = images
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers: list[dict[str, Any]] = []
        self.failures: list[str] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        image = load_digits_split().test.png(0)
        body = {"logits": LOGITS.tolist(), "options": {"probabilities": True, "logits": True}}
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._stop.is_set():
                try:
                    if self._images:
                        response = client.post(
                            "/predict?probabilities=true&logits=true",
                            content=image,
                            headers={"content-type": "image/png"},
                        )
                    else:
                        response = client.post("/calibrate", json=body)
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                else:
                    (self.answers if response.is_success else self.failures).append(response.json())


def wait_for_more(loads: list[Load]) -> None:
    """Let every client get one answer more, so that each swap falls among requests."""
    wanted = [(load, len(load.answers) + 1) for load in loads]
    deadline = time.monotonic() + 60
    while any(len(load.answers) < count and not load.failures for load, count in wanted):
        assert time.monotonic() < deadline, "a client gets no answers"
        time.sleep(0.001)


def test_two_hundred_swaps_under_load(service: Service) -> None:
    versions: list[int] = []
    for method in ("ts", "pb", "dpb"):
        done = service.client.post(
            "/fit?wait=240",
            files={"file": ("v.npz", validation_npz(300, seed=len(versions)))},
            data={"method": method, "activate": "never"},
        ).json()
        versions.append(done["calibrator"])
    known = {0: Calibrator.uncalibrated(10)} | {
        version: Calibrator.from_bytes(service.client.get(f"/calibrators/{version}/artifact").content)
        for version in versions
    }
    loads = [Load(service.url, images=turn == 0) for turn in range(CLIENTS)]
    for load in loads:
        load.start()
    rng = np.random.default_rng(0)
    behind, current = 0, service.client.get("/health/ready").json()["calibrator"]
    for _ in range(SWAPS):
        wait_for_more(loads)
        if behind and rng.random() < 0.4:
            response = service.client.post("/calibrators/rollback")
            behind -= 1
        else:
            wanted = int(rng.choice([version for version in known if version != current]))
            response = service.client.post(f"/calibrators/{wanted}/activate")
            assert response.json()["version"] == wanted
            behind += 1
        assert response.is_success, response.text
        current = response.json()["version"]
    wait_for_more(loads)
    for load in loads:
        load.stop()
    while behind:
        assert service.client.post("/calibrators/rollback").is_success
        behind -= 1

    assert [failure for load in loads for failure in load.failures] == []
    answers = [answer for load in loads for answer in load.answers]
    assert {answer["calibrator"]["version"] for answer in answers} == set(known)
    for answer in answers:
        rows = answer["predictions"]
        logits = torch.tensor([row["logits"] for row in rows], dtype=torch.float64)
        expected = known[answer["calibrator"]["version"]](logits).numpy()
        np.testing.assert_allclose([row["probabilities"] for row in rows], expected, atol=1e-9)
    # The versions answer differently enough for a mixture to be seen.
    shown = [calibrator(torch.from_numpy(LOGITS)).numpy() for calibrator in known.values()]
    for first in range(len(shown)):
        for second in range(first):
            assert np.abs(shown[first] - shown[second]).max() > 1e-6
