"""A number added to a row of scores changes no answer, so a fit to one kind of scores serves the others."""

import json
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load, save

from boxcal.calibrators import Calibrator, fit
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.onnx_export import export
from tests.calibrators.samples import overconfident

Floats = NDArray[np.float64]
METHODS = ("vector", "sms", "dpb", "lb", "ts+lb", "ets", "pts", "ts+pb", "isotonic")


def kinds(logits: Floats) -> dict[str, Floats]:
    """The same predictions as scores of five kinds."""
    log_sum = np.log(np.exp(logits).sum(axis=1, keepdims=True))
    shift = np.linspace(-30.0, 30.0, len(logits))[:, None]
    return {
        "logits": logits,
        "shifted": logits + shift,
        "log_probabilities": logits - log_sum,
        "logs_of_probabilities": np.log(np.exp(logits - log_sum)),
        "relative_to_largest": logits - logits.max(axis=1, keepdims=True),
    }


def biased(count: int, seed: int = 0) -> tuple[Floats, NDArray[np.int64]]:
    logits, labels = overconfident(count, 4, seed=seed)
    return (logits + torch.tensor([3.0, 1.0, 0.0, -1.0])).numpy(), labels.numpy()


@pytest.mark.parametrize("method", METHODS)
def test_what_a_fit_saw_does_not_matter_to_what_it_answers(method: str) -> None:
    logits, labels = biased(300)
    fitted = {
        kind: fit(method, scores, labels).calibrator.to_bytes() for kind, scores in kinds(logits).items()
    }
    new = kinds(biased(50, seed=1)[0])
    wanted = ArrayCalibrator.from_bytes(fitted["logits"])(new["logits"])
    for data in fitted.values():
        served = ArrayCalibrator.from_bytes(data), Calibrator.from_bytes(data)
        for scores in new.values():
            np.testing.assert_allclose(served[0](scores), wanted, rtol=0, atol=1e-4)
            np.testing.assert_allclose(served[0](scores), served[0](new["logits"]), rtol=0, atol=1e-9)
            answers = served[1](torch.from_numpy(scores)).numpy()
            np.testing.assert_allclose(answers, served[0](scores), rtol=0, atol=1e-12)


def test_an_exported_calibrator_answers_alike_for_all_kinds() -> None:
    logits, labels = biased(300)
    calibrator = fit("vector", logits, labels).calibrator
    session: Any = onnxruntime.InferenceSession(export(calibrator, request_bounds=False))
    new = kinds(biased(50, seed=1)[0])
    wanted = calibrator(torch.from_numpy(new["logits"])).numpy()
    for scores in new.values():
        (answers,) = session.run(None, {"logits": scores.astype(np.float32)})
        np.testing.assert_allclose(answers, wanted, rtol=0, atol=1e-5)


def test_an_artifact_of_version_1_answers_as_before() -> None:
    logits, labels = biased(300)
    calibrator = fit("vector", logits, labels).calibrator
    tensors = load(calibrator.to_bytes())
    spec = {"format": "boxcal-calibrator", "version": 1, "method": "vector", "num_classes": 4}
    old = save(tensors, metadata={"spec": json.dumps(spec)})
    p = {name: torch.from_numpy(value) for name, value in tensors.items()}
    scores = torch.from_numpy(logits) + 5.0
    mapped = scores / p["logit_map.temperature"] * p["logit_map.factors"] + p["logit_map.offsets"]
    for data in (old, Calibrator.from_bytes(old).to_bytes()):
        torch.testing.assert_close(Calibrator.from_bytes(data)(scores), mapped.softmax(1))
        np.testing.assert_allclose(ArrayCalibrator.from_bytes(data)(scores.numpy()), mapped.softmax(1))
    assert not torch.allclose(calibrator(scores), mapped.softmax(1), atol=1e-3)
