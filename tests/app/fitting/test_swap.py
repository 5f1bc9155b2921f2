"""Activating and rolling back under constant load: nobody fails, and every answer is its version's own."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import combinations

import numpy as np
import pytest
import torch

from boxcal.calibrators import Calibrator
from boxcal.models.digits_data import load_digits_split
from tests.app.fitting.service import Service
from tests.app.fitting.test_isolation import Load
from tests.app.fitting.validation_data import overconfident, validation_npz
from tests.app.running import PNG
from tests.app.waiting import until

CLIENTS = 4
LOGITS, _ = overconfident(3, seed=3)


def wait_for_more(loads: list[Load]) -> None:
    """Let every client get one answer more, so that each swap falls among requests."""
    wanted = [(load, load.answers + 1) for load in loads]
    until(lambda: all(load.answers >= count for load, count in wanted), 60)


@pytest.mark.parametrize("swaps", [6, pytest.param(30, marks=pytest.mark.long)])
def test_swaps_under_load(service: Service, swaps: int) -> None:
    known = {0: Calibrator.uncalibrated(10)}
    for seed, method in enumerate(("ts", "pb")):
        data = validation_npz(300, seed=seed)
        version = service.fit(data, method=method, activate="never").json()["calibrator"]
        artifact = service.client.get(f"/calibrators/{version}/artifact").content
        known[version] = Calibrator.from_bytes(artifact)
    body = {"logits": LOGITS.tolist(), "options": {"probabilities": True, "logits": True}}
    loads = [Load(service.url, "/calibrate", pause=0.0, json=body) for _ in range(CLIENTS)]
    image = load_digits_split().test.png(0)
    loads[0] = Load(service.url, "/predict?probabilities=true&logits=true", 0.0, content=image, headers=PNG)
    rng = np.random.default_rng(0)
    behind, current = 0, service.client.get("/health/ready").json()["calibrator"]
    with ExitStack() as stack:
        for load in loads:
            stack.enter_context(load)
        for _ in range(swaps):
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
    while behind:
        assert service.client.post("/calibrators/rollback").is_success
        behind -= 1

    assert [failure for load in loads for failure in load.failures] == []
    answers = [answer for load in loads for answer in load.documents]
    assert {answer["calibrator"]["version"] for answer in answers} == set(known)
    for answer in answers:
        rows = answer["predictions"]
        logits = torch.tensor([row["logits"] for row in rows], dtype=torch.float64)
        expected = known[answer["calibrator"]["version"]](logits).numpy()
        np.testing.assert_allclose([row["probabilities"] for row in rows], expected, atol=1e-9)
    # The versions answer differently enough for a mixture to be seen.
    shown = [calibrator(torch.from_numpy(LOGITS)).numpy() for calibrator in known.values()]
    for one, other in combinations(shown, 2):
        assert np.abs(one - other).max() > 1e-6
