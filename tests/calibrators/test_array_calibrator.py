"""Calibrators on arrays answer as those on tensors, for every method there is, and refuse the same bytes."""

import numpy as np
import pytest
import torch

from boxcal.calibrators import Bounds, Calibrator
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.errors import ArtifactError
from boxcal.calibrators.maps.base import BoxMap, LogitMap
from boxcal.calibrators.method import catalogue
from tests.calibrators.filled_maps import filled_calibrator
from tests.calibrators.samples import Array

BIT_IDENTICAL = {"uncalibrated", "ts", "pb", "pb-lower", "pb-upper", "ts+pb"}
STORED = ("ts+em", "matrix+pb-mlp+bias", "histogram", "vector+pb", "sms+lb", "fc+pb-mlp", "dpb+lb")
"""What no fit makes: adjustments, and what earlier versions fitted."""


def requests(count: int, num_classes: int) -> list[tuple[Array, Array] | None]:
    """No bounds; bounds that fitted ones can meet, and some to which they must yield; bounds of each row."""
    rng = np.random.default_rng(2)
    tight = rng.dirichlet(np.ones(num_classes), count) * 0.95
    return [
        None,
        (np.zeros(num_classes), np.full(num_classes, 0.8)),
        (np.full(num_classes, 0.9 / num_classes), np.full(num_classes, 1.1 / num_classes)),
        (tight, np.minimum(tight + 0.1, 1.0)),
    ]


@pytest.mark.parametrize("method", [*catalogue(), *STORED])
def test_arrays_give_the_answers_of_tensors(method: str) -> None:
    for num_classes in (3, 12):
        tensors = filled_calibrator(method, num_classes)
        data = tensors.to_bytes()
        arrays = ArrayCalibrator.from_bytes(data)
        assert arrays.to_bytes() == data
        assert (arrays.method, arrays.reads) == (method, tensors.reads)
        for count in (1, 5):
            rows = np.random.default_rng(count).normal(size=(count, arrays.width)) * 3.0
            for request in requests(count, num_classes):
                bounds = None if request is None else Bounds(*map(torch.from_numpy, request))
                expected = tensors.calibrate(torch.from_numpy(rows), bounds)
                found = arrays.calibrate(rows, request)
                exact = method in BIT_IDENTICAL and request is None
                for one, other in (
                    (found.probabilities, expected.probabilities),
                    (found.logits, expected.logits),
                    (found.box[0], expected.lower),
                    (found.box[1], expected.upper),
                ):
                    np.testing.assert_allclose(one, other.numpy(), rtol=0, atol=0 if exact else 1e-12)
                np.testing.assert_array_equal(found.relaxed, expected.relaxed.numpy())


def test_an_adjustment_and_the_uncalibrated_one_are_those_of_tensors() -> None:
    tensors, offsets = filled_calibrator("ets+pb", 5), np.linspace(-1.0, 1.0, 5)
    rows = np.random.default_rng(0).normal(size=(4, 5))
    found = ArrayCalibrator.from_bytes(tensors.to_bytes()).adjusted(offsets)
    expected = tensors.adjusted(offsets)
    assert found.method == expected.method
    np.testing.assert_allclose(found(rows), expected(torch.from_numpy(rows)).numpy(), rtol=0, atol=1e-12)
    assert ArrayCalibrator.uncalibrated(7).to_bytes() == Calibrator.uncalibrated(7).to_bytes()


@pytest.mark.parametrize("method", ["ts", "ets", "lb", "dpb", "isotonic", "pb", "fc"])
def test_bytes_of_what_no_fit_could_have_produced_are_refused(method: str) -> None:
    one = filled_calibrator(method, 4)
    for part in (one.logit_map, one.bound_map):
        for name, value in part.parameters.items():
            if not name.startswith(("head", "turned", "places")):
                changed = {name: np.full(value.shape, -7.0)}
                other = type(part)(4, part.parameters | changed)
                first = other if isinstance(other, LogitMap) else one.logit_map
                last = other if isinstance(other, BoxMap) else one.bound_map
                with pytest.raises(ArtifactError):
                    ArrayCalibrator.from_bytes(Calibrator(method, first, last, 4).to_bytes())
