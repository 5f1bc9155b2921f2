"""The short way through a calibrator answers as the long one does, and ranking as a plain sort would."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from boxcal.app.predict.answers import COMPILED_TOP_K, rank
from boxcal.calibrators.calibrator import Calibrator
from boxcal.calibrators.maps.base import LogitMap
from boxcal.calibrators.maps.constant_box import ConstantBounds
from boxcal.calibrators.maps.identity import IdentityMap
from boxcal.calibrators.maps.linear import VectorScaling
from boxcal.calibrators.maps.temperature import TemperatureScaling
from boxcal.calibrators.operator import box_constrained_softmax
from boxcal.calibrators.temperature_fast_path import temperature_rows

CLASSES = 20


def calibrator(temperature: float | None, lower: float, upper: float) -> Calibrator:
    scale: LogitMap = IdentityMap(CLASSES)
    if temperature is not None:
        scale = TemperatureScaling(CLASSES, {"temperature": temperature})
    return Calibrator("made", scale, ConstantBounds.of(CLASSES, lower, upper), CLASSES)


@pytest.mark.parametrize("temperature", [None, 0.3, 2.5])
@pytest.mark.parametrize("box", [(0.0, 1.0), (0.01, 0.4), (0.0, 0.05), (0.05, 1.0)])
@pytest.mark.parametrize("size", [1, 7])
def test_the_short_way_answers_as_the_long_one(
    temperature: float | None, box: tuple[float, float], size: int
) -> None:
    rng = np.random.default_rng(0)
    made = calibrator(temperature, *box)
    short = temperature_rows(made.logit_map, made.bound_map)
    assert short is not None
    assert short.box == (None if box == (0.0, 1.0) else box)
    for scale in (1e-3, 3.0, 1e3, 1e9):
        logits = rng.normal(size=(size, CLASSES)) * scale
        answered, mapped = short(logits)
        exact = box_constrained_softmax(torch.from_numpy(logits / (temperature or 1.0)), *box)
        np.testing.assert_array_equal(answered, exact.numpy())
        calibrated = made.calibrate(torch.from_numpy(logits))
        np.testing.assert_array_equal(answered, calibrated.probabilities.numpy())
        np.testing.assert_array_equal(mapped, calibrated.logits.numpy())
        one_by_one = np.concatenate([short(row[None])[0] for row in logits])
        np.testing.assert_array_equal(answered, one_by_one)
        probabilities, after, sums, largest = short.summarised(logits)
        np.testing.assert_array_equal(probabilities, answered)
        np.testing.assert_array_equal(after, mapped)
        np.testing.assert_allclose(sums, 1.0, atol=1e-12)
        np.testing.assert_array_equal(largest, answered.max(axis=1))
        assert (answered >= box[0]).all()
        assert (answered <= box[1]).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_the_short_way_refuses_a_row_that_is_not_finite(wrong: float) -> None:
    made = calibrator(2.0, 0.0, 1.0)
    short = temperature_rows(made.logit_map, made.bound_map)
    assert short is not None
    logits = np.zeros((3, CLASSES))
    logits[1, 4] = wrong
    with pytest.raises(ValueError, match="row 1"):
        short.summarised(logits)


def test_a_calibrator_that_is_more_than_a_temperature_and_a_box_has_no_short_way() -> None:
    assert temperature_rows(VectorScaling(4), ConstantBounds(4)) is None


@pytest.mark.parametrize("count", [1, 5, COMPILED_TOP_K, COMPILED_TOP_K + 1, 100])
def test_ranking_is_by_probability_then_logit_then_index(count: int) -> None:
    rng = np.random.default_rng(count)
    for classes in (2, 5, 17, 60):
        for _ in range(50):
            probabilities = rng.integers(0, 6, classes).astype(np.float64) / 8
            logits = rng.integers(0, 3, classes).astype(np.float64)
            order = sorted(range(classes), key=lambda i: (-probabilities[i], -logits[i], i))
            assert rank(probabilities, logits, count) == order[:count]
