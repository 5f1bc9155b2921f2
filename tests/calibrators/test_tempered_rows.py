"""Losses of rows with temperatures and bounds of their own, beside the general operator."""

import numpy as np
import pytest

from boxcal.calibrators.fitting.rows import TemperedRows, dense_loss
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
    """Logits up to thousands apart: weights of most classes are zero."""
    logits, labels, inverse, lower, upper = drawn(classes, scale)
    rows = TemperedRows(SortedRows(logits, labels))
    scores = np.ascontiguousarray(logits * inverse[:, None])
    losses, by_scores, by_lower, by_upper = dense_loss(scores, labels, lower, upper)
    by_inverse = (by_scores * logits).sum(axis=1)
    for _ in range(2):  # the second time from the cuts of the first
        answer = rows.losses(inverse, lower, upper)
        for own, expected in zip(answer, (losses, by_inverse, by_lower, by_upper), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-9, atol=1e-9 * max(1.0, scale))
