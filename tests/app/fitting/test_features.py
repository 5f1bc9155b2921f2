"""Methods that read features or inputs are fitted and served, and say what they miss where they cannot be."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from boxcal.app.fitting.backbones import BackboneSummary
from boxcal.app.fitting.worker import requirements
from boxcal.app.fitting.worker.reading import read_validation_data
from boxcal.app.settings.service import Settings
from boxcal.calibrators import Calibrator
from boxcal.models.backends.backbone import OpenBackbone
from boxcal.models.digits_data import load_digits_split
from boxcal.models.loading.specifications import load_backbone
from tests.app.fitting.service import Service
from tests.app.fitting.test_images import archive
from tests.app.fitting.validation_data import Floats, npz, validation_npz

SPLIT = load_digits_split()
COUNT = 200


@pytest.fixture(scope="module")
def backbone() -> OpenBackbone:
    loaded = load_backbone("digits", weights=None, labels=None, device="cpu", precision="float32")
    assert isinstance(loaded, OpenBackbone)
    return loaded


@pytest.fixture(scope="module")
def arrays(backbone: OpenBackbone) -> dict[str, Floats]:
    inputs = SPLIT.validation.levels[:COUNT]
    return {
        "logits": np.asarray(backbone(inputs)),
        "features": np.asarray(backbone.features(inputs)),
        "labels": SPLIT.validation.labels[:COUNT],
    }


def served_probabilities(service: Service, count: int) -> tuple[int, Floats]:
    tensors = SPLIT.test.levels[:count].tolist()
    body = {"inputs": [{"tensor": one} for one in tensors], "options": {"probabilities": True}}
    answer = service.client.post("/predict", json=body)
    assert answer.status_code == 200, answer.text
    document = answer.json()
    rows = np.array([one["probabilities"] for one in document["predictions"]])
    return document["calibrator"]["version"], rows


def check_served(service: Service, backbone: OpenBackbone, done: dict[str, Any]) -> None:
    """The finished fit is active, and gives what its calibrator makes of the features of the model."""
    assert (done["state"], done["activated"]) == ("succeeded", True), done
    version, rows = served_probabilities(service, 40)
    assert version == done["calibrator"]
    calibrator = Calibrator.from_bytes(service.client.get(f"/calibrators/{version}/artifact").content)
    expected = calibrator(backbone.features(torch.from_numpy(SPLIT.test.levels[:40])))
    np.testing.assert_allclose(rows, expected.numpy(), atol=1e-5)


@pytest.mark.parametrize("method", ["fc", pytest.param("ta", marks=pytest.mark.long)])
def test_a_calibrator_of_features_is_fitted_and_served(
    service: Service, backbone: OpenBackbone, arrays: dict[str, Floats], method: str
) -> None:
    done = service.fit(npz(**arrays), method=method, activate="always").json()
    check_served(service, backbone, done)
    logits = arrays["logits"]
    calibrated = service.client.post("/calibrate", json={"logits": logits[:2].tolist()})
    compared = service.fit(npz(logits=logits, labels=arrays["labels"]), method="ts")
    assert calibrated.status_code == compared.status_code == 422
    assert "reads features" in calibrated.json()["detail"]
    assert f"For the active calibrator, '{method}'" in compared.json()["detail"]
    assert service.client.post("/calibrators/rollback").json()["version"] == 0


@pytest.mark.long
def test_a_shift_of_the_inputs_is_fitted_to_images_and_served(
    service: Service, backbone: OpenBackbone
) -> None:
    done = service.fit(archive(), method="nc", activate="always").json()
    assert (done["state"], done["activated"]) == ("succeeded", True), done
    version, rows = served_probabilities(service, 40)
    calibrator = Calibrator.from_bytes(service.client.get(f"/calibrators/{version}/artifact").content)
    assert calibrator.input_shift is not None
    shifted = torch.from_numpy(SPLIT.test.levels[:40]) + calibrator.input_shift
    np.testing.assert_allclose(rows, calibrator(backbone(shifted.float())).numpy(), atol=1e-5)
    assert service.client.post("/calibrators/rollback").json()["version"] == 0


def test_missing_requirements_are_named(service: Service, arrays: dict[str, Floats]) -> None:
    features = arrays["features"]
    for data, method, says in (
        (validation_npz(), "fc", "an array `features` (N, D)"),
        (npz(**arrays), "nc", "upload labelled images"),
        (npz(**arrays | {"features": features[:, :-1]}), "ta", "columns, and digits has"),
        (npz(**arrays | {"features": features[::-1]}), "ta", "does not make logits[0] of features[0]"),
        (npz(**arrays | {"features": np.nan * features}), "ta", "features[0, 0] is nan"),
    ):
        refused = service.fit(data, method=method)
        assert (refused.status_code, says in refused.json()["detail"]) == (422, True), refused.text


def test_a_backbone_that_gives_logits_alone_is_named(tmp_path: Path, arrays: dict[str, Floats]) -> None:
    (tmp_path / "v.npz").write_bytes(npz(**arrays))
    data = read_validation_data(tmp_path / "v.npz", tmp_path, Settings(), lambda *_: None)
    closed = BackboneSummary(
        "onnx:net.onnx", tuple("0123456789"), (1,), gives_features=False, is_open=False, head=None
    )
    without_gradients = replace(closed, name="digits", gives_features=True)
    assert requirements.missing("logits", data, closed) is None
    for reads, backbone, says in (
        ("features", closed, "the format of onnx:net.onnx gives logits alone"),
        ("features", without_gradients, "has no linear last layer"),
        ("inputs", without_gradients, "the format of digits gives logits and features alone"),
    ):
        assert says in str(requirements.missing(reads, data, backbone))


def test_features_of_digits_are_fitted_and_served_without_torch(
    tmp_path: Path, backbone: OpenBackbone
) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "torch.py").write_text("raise ModuleNotFoundError('hidden', name='torch')")
    service = Service(tmp_path / "data", model="digits")
    paths = str(hidden), service.environment.get("PYTHONPATH", "")
    service.environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))  # of its workers too
    with service:
        check_served(service, backbone, service.fit(archive(), method="fc", activate="always").json())
        refused = service.fit(archive(), method="nc")
        assert refused.status_code == 422
        assert "the format of digits gives logits and features alone" in refused.json()["detail"]
        if sys.platform == "linux":
            maps = Path(f"/proc/{service.process.pid}/maps").read_text()
            assert "onnxruntime" in maps
            assert "libtorch" not in maps
