"""Sorted rows under uniform bounds: the operator's own answers, and gradients by finite differences."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from boxcal.calibrators.operator import box_constrained_softmax
from boxcal.calibrators.operator.uniform import SortedRows

ROWS, CLASSES = 400, 30


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    spread = torch.logspace(-1, 2, ROWS, dtype=torch.float64)[:, None]
    logits = torch.randn(ROWS, CLASSES, generator=random, dtype=torch.float64) * spread
    return logits, torch.randint(CLASSES, (ROWS,), generator=random)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        *((0, 1), (1e-3, 0.9), (0.02, 0.5), (0, 0.2), (0.01, 1), (1 / 30, 1), (0, 1 / 30)),
        (1e-6, 1 / 30 + 1e-9),
        (np.linspace(0, 1 / CLASSES, ROWS), np.geomspace(1 / CLASSES, 1, ROWS)),
    ],
)
def test_probabilities_are_the_operators(
    data: tuple[torch.Tensor, torch.Tensor], lower: Any, upper: Any
) -> None:
    logits, labels = data
    low, high = (np.broadcast_to(np.asarray(bound, np.float64), ROWS) for bound in (lower, upper))
    rows = SortedRows(logits, labels)
    found = [-rows.rows(np.array([n])).nll(low[n], high[n]).value for n in range(ROWS)]
    box = (torch.tensor(bound)[:, None] for bound in (low.copy(), high.copy()))
    wanted = box_constrained_softmax(logits, *box)[torch.arange(ROWS), labels]
    assert np.abs(np.exp(found) - wanted.numpy()).max() <= 1e-12


def test_probabilities_far_below_underflow_keep_their_logarithm() -> None:
    rows = SortedRows(np.array([[0.0, -5000.0, -6000.0]]), np.array([2]))
    assert rows.nll(0.0, 1.0).value == pytest.approx(6000.0)
    assert rows.nll(0.0, 0.75).value == pytest.approx(1000.0 - math.log(0.25))


def test_gradient_by_finite_differences(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    rows = SortedRows(*data)
    step = 1e-8
    for lower, upper in [(1e-3, 0.9), (0.012, 0.43), (0.02, 0.11)]:
        found = rows.nll(lower, upper)
        by_lower = (rows.nll(lower + step, upper).value - rows.nll(lower - step, upper).value) / (2 * step)
        by_upper = (rows.nll(lower, upper + step).value - rows.nll(lower, upper - step).value) / (2 * step)
        assert found.by_lower == pytest.approx(by_lower, rel=1e-4, abs=1e-5)
        assert found.by_upper == pytest.approx(by_upper, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    ("logits", "label", "said"),
    [
        ([0.0, math.nan], 0, "row 0 hold NaN"),
        ([-math.inf, -math.inf], 0, "nothing but -inf"),
        ([0.0, 1.0], 2, "label 2 of row 0"),
    ],
)
def test_what_does_not_serve_is_named(logits: list[float], label: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        SortedRows(np.array([logits]), np.array([label]))
    with pytest.raises(ValueError, match="infeasible for 30 classes"):
        SortedRows(np.zeros((1, CLASSES)), np.array([0])).nll(0.04, 1.0)
