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
