"""A number added to a row of scores changes no answer, so a fit to one kind of scores serves the others."""

import json

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load, save

from boxcal.calibrators import Calibrator, fit
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.chain import Chain
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.logit_bounding import LogitBounding
from boxcal.calibrators.method import logit_maps
from tests.calibrators.filled_maps import CLASSES, filled
from tests.calibrators.samples import overconfident

Floats = NDArray[np.float64]
BOX = {"bound_map.lower": np.array(0.0), "bound_map.upper": np.array(1.0)}
METHODS = ("vector", "sms", "dpb", "lb", "ets", "ts+pb", "isotonic")


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


@pytest.mark.parametrize(
    "one", [one for one in logit_maps().values() if one is not Chain], ids=lambda one: one.name
)
def test_no_map_reads_the_number_added_to_a_row(one: type[LogitMap]) -> None:
    if one.reads == "features":
        return
    rows = np.random.default_rng(0).normal(size=(50, CLASSES)) * 3.0
    added = np.linspace(-100.0, 100.0, 50)[:, None]
    for logit_map in (filled(one), Chain(filled(one), filled(LogitBounding))):
        served = ArrayCalibrator(one.name, logit_map, ConstantBounds(CLASSES), CLASSES)
        np.testing.assert_allclose(served(rows + added), served(rows), rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["lb", "ts+lb"])
def test_logit_bounding_stored_before_it_read_rows_from_their_largest_answers_as_before(method: str) -> None:
    place = "logit_map." if method == "lb" else "logit_map.second."
    limits = {place + "logit_lower": np.array(0.1), place + "logit_upper": np.array(0.4)}
    if method == "ts+lb":
        limits["logit_map.first.temperature"] = np.array(1.0)
    spec = {"format": "boxcal-calibrator", "version": 2, "method": method, "num_classes": 4}
    old = save(limits | BOX, metadata={"spec": json.dumps(spec)})
    rows = np.array([[8.0, 4.0, 2.0, -2.0]])  # 5, 1, -1, -5 less the mean, of norm 52^0.5
    low, high = 0.1 * 52**0.5, 0.4 * 52**0.5
    wanted = torch.tensor([[high, 1.0, low, low]], dtype=torch.float64).clamp_min(low).softmax(1)
    for data in (old, Calibrator.from_bytes(old).to_bytes()):
        np.testing.assert_allclose(ArrayCalibrator.from_bytes(data)(rows), wanted, rtol=1e-12)


def test_logit_bounding_limits_how_far_classes_are_from_the_largest() -> None:
    given = {"logit_lower": -0.5, "logit_upper": -0.1}
    served = ArrayCalibrator("lb", LogitBounding(4, given), ConstantBounds(4), 4)
    rows = np.array([[8.0, 8.0, 5.0, 4.0], [3.0, 3.0, 0.0, -1.0]])  # 0, 0, -3, -4 less the largest, of norm 5
    wanted = np.exp([-0.5, -0.5, -2.5, -2.5])
    np.testing.assert_allclose(served(rows), np.tile(wanted / wanted.sum(), (2, 1)), rtol=1e-12)


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
