"""The option `prior_adjustment` against a real service."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np

from boxcal.app.client import BoxcalClient
from tests.app.monitoring.traffic import CLASSES, client_of, predict
from tests.app.running import running
from tests.app.waiting import until


def shifted(count: int, factors: Any, seed: int) -> tuple[Any, Any]:
    """Logits that are calibrated for equal class frequencies, and labels of other frequencies."""
    rng = np.random.default_rng(seed)
    pool = rng.normal(0, 2, (20 * count, CLASSES))
    rows = np.exp(pool) / np.exp(pool).sum(1, keepdims=True)
    weights = (rows * factors).sum(1)
    chosen = rng.choice(len(pool), count, p=weights / weights.sum())
    law = rows[chosen] * factors / weights[chosen, None]
    return pool[chosen], (law.cumsum(1) > rng.random((count, 1))).argmax(1)


def nll(client: httpx.Client, logits: Any, labels: Any, **options: Any) -> tuple[float, dict[str, Any]]:
    body = {"logits": logits.tolist(), "options": {"top_k": 1, "probabilities": True, **options}}
    answer = client.post("/calibrate", json=body).raise_for_status().json()
    rows = np.array([prediction["probabilities"] for prediction in answer["predictions"]])
    return float(-np.log(rows[np.arange(len(labels)), labels]).mean()), answer


def test_answers_are_adjusted_to_the_class_frequencies_of_recent_predictions(data_dir: Path) -> None:
    factors = np.array([8.0, 4, 1, 1, 1, 1, 1, 0.3, 0.1, 0.1])
    traffic, _ = shifted(2000, factors, 1)
    logits, labels = shifted(2000, factors, 2)
    asked = {"prior_adjustment": True}
    with client_of(data_dir, model=f"logits:{CLASSES}") as client:
        predict(client, traffic[:500])
        refused = client.post("/calibrate", json={"logits": logits[:1].tolist(), "options": asked})
        assert refused.status_code == 409
        assert "needs 1,000 of its predictions" in refused.json()["detail"]
        predict(client, traffic[500:])
        until(lambda: client.get("/monitor").json()["log"]["rows"] >= 2000, 280)
        before, _ = nll(client, logits, labels)
        after, answer = nll(client, logits, labels, **asked)
        assert after < before - 0.1
        assert answer["calibrator"] == {"version": 0, "method": "uncalibrated+em"}
        bounds = {"bounds": {"upper": 0.5}}
        _, bounded = nll(client, logits[:50], labels[:50], **asked, **bounds)
        assert max(max(one["probabilities"]) for one in bounded["predictions"]) <= 0.5
        ids = client.post(
            "/calibrate", json={"logits": logits[:1].tolist(), "options": asked | {"feedback": True}}
        )
        assert ids.json()["predictions"][0]["id"]


def test_without_a_shift_the_adjustment_changes_nothing(data_dir: Path) -> None:
    """A calibrator that overrates some classes: its mean answers, not the labels, are the prior."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 2, (7000, CLASSES))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    logits += np.linspace(-1.5, 1.5, CLASSES)  # which no temperature takes away
    with (
        running(data_dir, model=f"logits:{CLASSES}") as service,
        BoxcalClient(service.url) as fits,
        httpx.Client(base_url=service.url, timeout=60) as client,
    ):
        queued = fits.fit_arrays(logits[:2000], labels[:2000], method="ts", activate="always")
        fits.wait_for_fit(queued.id)
        predict(client, logits[2000:5000])
        until(lambda: client.get("/monitor").json()["log"]["rows"] >= 3000, 280)
        before, _ = nll(client, logits[5000:], labels[5000:])
        after, answer = nll(client, logits[5000:], labels[5000:], prior_adjustment=True)
        assert answer["calibrator"]["method"] == "ts+em"
        assert after == before
