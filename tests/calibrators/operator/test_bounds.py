"""Bounds: what is feasible, what is said when it is not, and how fitted bounds yield to a request's."""

import numpy as np
import pytest
import torch
from torch import Tensor

from boxcal.calibrators.operator import Bounds, box_constrained_softmax


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("lower", "upper", "said"),
    [
        (-0.1, 1.0, r"lower bound -0.1\d* is not a probability"),
        (0.0, f64(0.5, 1.5), "upper bound 1.5 of class 1 is not a probability"),
        (0.0, torch.tensor([[0.5, 1.0], [1.0, np.nan]]), "upper bound nan of class 1 in row 1"),
        (f64(0.1, 0.6), f64(1.0, 0.5), r"lower bound 0.6\d* is above upper bound 0.5 of class 1"),
        (f64(0.75, 0.5), 1.0, "lower bounds add up to 1.25, above 1"),
        (0.0, f64(0.25, 0.5), "upper bounds add up to 0.75, below 1"),
        (0.0, torch.tensor([[1.0, 1.0], [0.25, 0.5]]), "upper bounds add up to 0.75 in row 1, below 1"),
        (f64(0.1, 0.1), f64(1.0, 1.0, 1.0), "do not match"),
        (torch.zeros(1, 2, 3), 1.0, "at most"),
    ],
)
def test_infeasible_bounds_are_named(lower: float | Tensor, upper: float | Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Bounds(lower, upper)


def test_numbers_meet_numbers_and_are_checked_once_the_classes_are_known() -> None:
    bounds = Bounds(0.0, 0.2)
    assert bounds.check(5) is bounds
    with pytest.raises(ValueError, match=r"add up to 0.8\d*, below 1"):
        bounds.check(4)
    with pytest.raises(ValueError, match="bounds for 3 classes cannot bound 4"):
        Bounds(0.0, f64(1, 1, 1)).check(4)
    effective = Bounds(0.02, 0.5).yielding_to(Bounds(0.0, 0.3), num_classes=5)
    assert effective.relaxed.shape == ()
    assert effective.bounds.upper.item() == 0.3
    with pytest.raises(ValueError, match="number of classes"):
        Bounds(0.02, 0.5).yielding_to(Bounds(0.0, 0.3))


@pytest.mark.parametrize("classes", [3, 7, 10, 49, 1000])
def test_feasible_by_a_hair(classes: int) -> None:
    share = torch.full((classes,), 1 / classes, dtype=torch.float64)
    Bounds(share, share)
    weights = torch.rand(classes, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    Bounds(weights / weights.sum(), 1.0)


def test_bounds_that_agree_are_only_clipped_and_only_rows_that_need_it_are_relaxed() -> None:
    effective = Bounds(0.1, 0.8).yielding_to(Bounds(f64(0, 0.2, 0), f64(0.5, 1, 0.05)))
    assert effective.bounds.lower.tolist() == [0.1, 0.2, 0.05]
    assert effective.bounds.upper.tolist() == [0.5, 0.8, 0.05]
    assert not effective.relaxed
    fitted = Bounds(0.0, f64(0.4, 0.4, 0.4))
    request = Bounds(0.0, torch.tensor([[1.0, 1.0, 1.0], [0.1, 0.1, 1.0]], dtype=torch.float64))
    effective = fitted.yielding_to(request)
    assert effective.relaxed.tolist() == [False, True]
    assert effective.bounds.upper[0].tolist() == [0.4, 0.4, 0.4]
    assert effective.bounds.upper[1].tolist() == pytest.approx([0.1, 0.1, 0.8])


def test_the_least_relaxation_is_continuous_where_it_begins() -> None:
    fitted, request = Bounds(f64(0.3, 0.3, 0.3), 1.0), Bounds(f64(0.0, 0.6, 0.0), 1.0)
    effective = fitted.yielding_to(request)
    assert effective.relaxed
    assert torch.allclose(effective.bounds.lower, f64(0.2, 0.6, 0.2), atol=1e-15)
    fitted, request = Bounds(0.0, f64(0.4, 0.4, 0.4)), Bounds(0.0, f64(1.0, 0.1, 1.0))
    effective = fitted.yielding_to(request)
    assert torch.allclose(effective.bounds.upper, f64(0.45, 0.1, 0.45), atol=1e-15)
    fitted = Bounds(f64(0.3, 0.3, 0.3), 1.0)
    answers = [
        fitted.yielding_to(Bounds(f64(0, bound, 0), 1.0)).bounds.lower for bound in (0.4 - 1e-9, 0.4 + 1e-9)
    ]
    assert (answers[0] - answers[1]).abs().max() <= 1e-8


@pytest.mark.parametrize("seed", range(20))
def test_relaxed_bounds_stay_inside_the_request_and_feasible(seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    rows, classes = 50, 6
    draws = torch.rand(4, rows, classes, generator=random, dtype=torch.float64) ** 2

    def feasible(low: Tensor, high: Tensor) -> Bounds:
        low = low / low.sum(-1, keepdim=True).clamp(min=1)
        high = torch.maximum(high, low)
        return Bounds(low, (high / high.sum(-1, keepdim=True).clamp(max=1)).clamp(max=1).maximum(low))

    fitted, request = feasible(draws[0], draws[1]), feasible(draws[2], draws[3])
    effective = fitted.yielding_to(request)
    lower, upper = effective.bounds.lower, effective.bounds.upper
    assert effective.relaxed.any()
    assert ((lower >= request.lower) & (upper <= request.upper)).all()
    logits = 5 * torch.randn(rows, classes, generator=random, dtype=torch.float64)
    answer = box_constrained_softmax(logits, lower, upper)
    assert ((answer >= request.lower) & (answer <= request.upper)).all()
    assert (answer.sum(-1) - 1).abs().max() <= 1e-14


def test_a_hair_of_relaxation_leaves_no_rounding_of_far_bounds_behind() -> None:
    request = torch.ones(100, dtype=torch.float64)
    request[10] = 1.3698365637875762e-05
    bounds, relaxed = Bounds(0.009000000000000001, 0.01).yielding_to(Bounds(0.0, request))
    assert relaxed
    assert abs(bounds.upper.sum().item() - 1) < 1e-15
    assert (bounds.upper <= request).all()
