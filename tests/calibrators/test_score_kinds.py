"""A number added to a row of scores changes no answer, so a fit to one kind of scores serves the others."""

import numpy as np
import pytest
import torch

from boxcal.calibrators import Calibrator, fit
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.chain import Chain
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.logit_bounding import LogitBounding
from boxcal.calibrators.method import logit_maps
from tests.calibrators.filled_maps import CLASSES, filled
from tests.calibrators.samples import Floats, Set, overconfident

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


def biased(count: int, seed: int = 0) -> Set:
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


def test_logit_bounding_limits_how_far_classes_are_from_the_largest() -> None:
    given = {"logit_lower": -0.5, "logit_upper": -0.1}
    served = ArrayCalibrator("lb", LogitBounding(4, given), ConstantBounds(4), 4)
    rows = np.array([[8.0, 8.0, 5.0, 4.0], [3.0, 3.0, 0.0, -1.0]])  # 0, 0, -3, -4 less the largest, of norm 5
    wanted = np.exp([-0.5, -0.5, -2.5, -2.5])
    np.testing.assert_allclose(served(rows), np.tile(wanted / wanted.sum(), (2, 1)), rtol=1e-12)
