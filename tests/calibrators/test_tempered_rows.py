"""Losses of rows with temperatures and bounds of their own, beside the general operator."""

import numpy as np
import pytest

from boxcal.calibrators.fitting.joint import dense_loss
from boxcal.calibrators.fitting.tempered_rows import TemperedRows
from boxcal.calibrators.operator.uniform import SortedRows

N = 300


def drawn(classes: int, scale: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Logits, labels, and a temperature's reciprocal and a box for each row; some boxes hold nothing."""
    rng = np.random.default_rng(seed)
    logits = scale * rng.normal(size=(N, classes))
    lower = np.where(rng.random(N) < 0.3, 0.0, rng.random(N) / classes)
    upper = np.where(rng.random(N) < 0.3, 1.0, 1.0 / classes + (1.0 - 1.0 / classes) * rng.random(N))
    return logits, rng.integers(classes, size=N), np.exp(0.5 * rng.normal(size=N)), lower, upper


@pytest.mark.parametrize("classes", [2, 7, 130])
@pytest.mark.parametrize("scale", [0.1, 4.0, 60.0, 1000.0])
def test_losses_are_those_of_the_operator(classes: int, scale: float) -> None:
    """Logits up to thousands apart: weights of most classes are zero in both number formats."""
    logits, labels, inverse, lower, upper = drawn(classes, scale)
    rows = TemperedRows(SortedRows(logits, labels))
    scores = np.ascontiguousarray(logits * inverse[:, None])
    losses, by_scores, by_lower, by_upper = dense_loss(scores, labels, lower, upper)
    by_inverse = (by_scores * logits).sum(axis=1)
    for found, digits in ((rows, 1e-9), (rows.rough(), 3e-5)):
        for _ in range(2):  # the second time from the cuts of the first
            answer = found.losses(inverse, lower, upper)
            for own, expected in zip(answer, (losses, by_inverse, by_lower, by_upper), strict=True):
                np.testing.assert_allclose(own, expected, rtol=digits, atol=digits * max(1.0, scale))


def test_rough_losses_do_not_depend_on_the_scale_of_the_logits() -> None:
    logits, labels, inverse, lower, upper = drawn(20, 3.0)
    one, other = (TemperedRows(SortedRows(factor * logits, labels)).rough() for factor in (1.0, 1e6))
    assert one.scores.dtype == other.scores.dtype == np.float32
    found, scaled = one.losses(inverse, lower, upper), other.losses(1e-6 * inverse, lower, upper)
    scaled[1] /= 1e6  # the derivative in 1 / temperature
    np.testing.assert_allclose(scaled, found, rtol=1e-6, atol=1e-9)


def test_rows_far_apart_are_not_rounded() -> None:
    logits, labels, *_ = drawn(20, 3.0)
    logits[0, 0] = -1e5
    assert TemperedRows(SortedRows(logits, labels)).rough().scores.dtype == np.float64


@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_many_classes_are_shortened_in_rough_losses(scale: float) -> None:
    """Boxes and labels are those of all classes, though an entry stands for up to 16 of them."""
    logits, labels, inverse, lower, upper = drawn(1000, scale)
    ascending = SortedRows(logits, labels)
    exact = TemperedRows(ascending)
    rough = exact.rough()
    assert rough.scores.shape == (N, 191)
    assert rough.counts.sum() == 1000
    assert rough.rough().scores.shape == rough.scores.shape
    (one, by_inverse, *_), (other, also, *_) = (rows.losses(inverse, lower, upper) for rows in (exact, rough))
    np.testing.assert_allclose(other, one, atol=1e-3)
    np.testing.assert_allclose(
        also, by_inverse, rtol=1e-2, atol=1e-2
    )  # a bound holds a whole entry, or none of it
    short = ascending.rough().log_probability(lower, upper)
    np.testing.assert_allclose(short.value, ascending.log_probability(lower, upper).value, atol=1e-3)
    some = np.arange(0, N, 3)
    np.testing.assert_array_equal(
        ascending.rough().rows(some).log_probability(lower[some], upper[some]).value, short.value[some]
    )


@pytest.mark.parametrize("classes", [130, 1000])
def test_rows_that_lose_by_it_are_not_shortened(classes: int) -> None:
    """Few classes; and a row of two groups of equal logits, between which one of the means would lie."""
    logits, labels, *_ = drawn(classes, 1.0)
    logits[0] = np.where(np.arange(classes) < 501, 0.0, 6.0)
    assert SortedRows(logits, labels).rough().scores.shape == (N, classes)
    assert TemperedRows(SortedRows(logits, labels)).rough().scores.shape == (N, classes)
