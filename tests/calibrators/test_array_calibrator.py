"""Calibrators on arrays answer as those on tensors, for every method there is, and refuse the same bytes."""

import numpy as np
import pytest
import torch

from boxcal.calibrators import Bounds, Calibrator
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.errors import ArtifactError, InvalidDataError
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


@pytest.mark.parametrize("method", [*catalogue(), *STORED])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_number_that_is_none_is_named_as_it_was_given(method: str, value: float) -> None:
    tensors = filled_calibrator(method, 5)
    rows = np.random.default_rng(0).normal(size=(3, tensors.width))
    rows[1, 2] = value
    if method.startswith("fc") and value == np.inf:  # it cuts features off above
        assert np.isfinite(tensors.on_arrays(rows)).all()
        return
    what = "logit of class 2" if tensors.reads == "logits" else "feature 2"
    for answer in (lambda: tensors(torch.from_numpy(rows)), lambda: tensors.on_arrays(rows)):
        with pytest.raises(ValueError, match=f"^the {what} in row 1 is {value}$"):
            answer()


@pytest.mark.parametrize("method", ["lb", "vector", "dpb"])
def test_a_logit_of_minus_infinity_is_named_where_a_method_has_no_answer_to_it(method: str) -> None:
    rows = np.array([[0.0, -np.inf, 1.0]])
    assert filled_calibrator("ts", 3).on_arrays(rows)[0, 1] == 0.0
    with pytest.raises(ValueError, match=r"^the logit of class 1 in row 0 is -inf$"):
        filled_calibrator(method, 3).on_arrays(rows)


def test_bounds_of_another_number_of_rows_are_told() -> None:
    bounds = Bounds(torch.zeros(3, 5), torch.ones(3, 5))
    with pytest.raises(InvalidDataError, match=r"^bounds for 3 rows cannot bound 2 rows of logits$"):
        filled_calibrator("ts", 5)(torch.zeros(2, 5), bounds)
