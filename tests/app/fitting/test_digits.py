"""What a user gets: the default fit on the digits' validation split, judged on their test split."""

import numpy as np
import pytest
import torch

from boxcal.calibrators import evaluate
from boxcal.models.digits_data import load_digits_split
from boxcal.models.loading.specifications import load_backbone
from tests.app.fitting.service import Service
from tests.app.fitting.validation_data import Floats, npz


@pytest.fixture(scope="module")
def split_logits() -> dict[str, Floats]:
    backbone = load_backbone("digits", weights=None, labels=None, device="cpu", precision="float32")
    split = load_digits_split()
    parts = {"validation": split.validation, "test": split.test}
    return {name: backbone(torch.from_numpy(part.levels)).numpy() for name, part in parts.items()}


def test_the_default_fit_improves_nll_and_both_calibration_errors(
    service: Service,
    split_logits: dict[str, Floats],
) -> None:
    split = load_digits_split()
    upload = npz(logits=split_logits["validation"], labels=split.validation.labels)
    done = service.client.post("/fit?wait=240", files={"file": ("digits.npz", upload)}).json()
    assert (done["state"], done["activated"]) == ("succeeded", True), done
    body = {"logits": split_logits["test"].tolist()}
    metrics = {}
    for version in (0, done["calibrator"]):
        options = {"probabilities": True, "calibrator": version}
        answer = service.client.post("/calibrate", json=body | {"options": options}).json()
        probabilities = np.array([row["probabilities"] for row in answer["predictions"]])
        metrics[version] = evaluate(probabilities, split.test.labels)
    before, after = metrics[0], metrics[done["calibrator"]]
    print(f"nll {before.nll:.4f} -> {after.nll:.4f}")  # noqa: T201 - shown by -s
    print(f"ece {before.ece_width:.4f} -> {after.ece_width:.4f}")  # noqa: T201
    print(f"mass {before.ece_mass:.4f} -> {after.ece_mass:.4f}")  # noqa: T201
    assert after.nll < before.nll
    assert after.ece_width < before.ece_width
    assert after.ece_mass < before.ece_mass
    assert service.client.post("/calibrators/rollback").json()["version"] != done["calibrator"]
