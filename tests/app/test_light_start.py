"""A server of an ONNX model, as `digits` is, or of logits alone loads no torch, and no library of fits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pytest

from boxcal.models.digits_data import load_digits_split
from tests.app.fitting.files import npy
from tests.app.fitting.service import Service
from tests.app.running import NPY
from tests.models.files import CLASSES, write_onnx

HEAVY = ("libtorch", "sklearn", "matplotlib", "libarrow", "pandas")
BOUNDS = {"lower": {"1": 0.3}, "upper": 0.6}


def heavy_libraries(service: Service) -> set[str]:
    mapped = Path(f"/proc/{service.process.pid}/maps").read_text()
    return {name for name in HEAVY if name in mapped}


def bounded(answer: httpx.Response) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """The probabilities of an answer, which obey `BOUNDS`."""
    assert answer.status_code == 200, answer.text
    rows = np.array([one["probabilities"] for one in answer.json()["predictions"]])
    np.testing.assert_allclose(rows.sum(axis=1), 1.0, atol=1e-12)
    assert rows.max() <= 0.6
    assert rows[:, 1].min() >= 0.3
    return rows


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_predictions_and_calibrations_with_bounds_need_no_torch(tmp_path: Path) -> None:
    model = write_onnx(tmp_path / "m.onnx")
    logits = np.random.default_rng(0).normal(size=(70, CLASSES)) * 4.0
    images = np.random.default_rng(1).normal(size=(3, 3, 4, 4)).astype(np.float32)
    with Service(tmp_path / "data", model=f"onnx:{model}") as service:
        client = service.client
        options = {"bounds": BOUNDS, "probabilities": True, "logits": True, "explain": True}
        rows = bounded(client.post("/calibrate", json={"logits": logits.tolist(), "options": options}))
        assert rows.shape == (70, CLASSES)
        query = {"lower": "0.05", "upper": "0.6", "probabilities": "true"}
        answer = client.post("/predict", params=query, content=npy(images), headers=NPY)
        assert answer.status_code == 200, answer.text
        tensors = [{"tensor": one.tolist()} for one in images]
        bounded(client.post("/predict", json={"inputs": tensors, "options": options}))
        for path in ("/model", "/calibrators", "/metrics", "/health/ready", "/v2/models/m.onnx"):
            client.get(path)
        assert not heavy_libraries(service)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_default_model_needs_no_torch_where_it_is_installed(tmp_path: Path) -> None:
    images = load_digits_split().test.levels[:3]
    service = Service(tmp_path, model="digits")
    service.has_torch = True
    with service:
        answer = service.client.post("/predict", content=npy(images), headers=NPY)
        assert answer.status_code == 200, answer.text
        assert not heavy_libraries(service)


def test_a_service_on_sqlite_starts_without_rich_and_postgresql() -> None:
    """Each takes some 20 to 60 ms of every start."""
    code = (
        "import sys; from boxcal.app.cli import commands, settings; settings.setting_options(); "
        "import boxcal.app.server; print(*({'rich', 'sqlalchemy.dialects.postgresql'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"\n"
