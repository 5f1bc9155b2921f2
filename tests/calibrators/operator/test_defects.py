"""Known answers, and one test for every defect that implementations of this operator have been seen with."""

import math

import numpy as np
import psutil
import pytest
import torch

from boxcal.calibrators.operator import Bounds, box_constrained_softmax
from tests.calibrators.operator.test_bounds import f64
from tests.reference import box_bisection, one_step_greedy


def test_vacuous_bounds_give_softmax() -> None:
    logits = torch.randn(50, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.allclose(box_constrained_softmax(logits), logits.softmax(-1), rtol=0, atol=1e-15)


def test_two_classes_give_a_clipped_sigmoid() -> None:
    difference = torch.linspace(-8, 8, 201, dtype=torch.float64)
    logits = torch.stack([difference, torch.zeros_like(difference)], -1)
    low, high = 0.12, 0.93
    wanted = difference.sigmoid().clamp(max(low, 1 - high), min(1 - low, high))
    assert torch.allclose(box_constrained_softmax(logits, low, high)[:, 0], wanted, rtol=0, atol=1e-15)


def test_the_greedy_counterexample() -> None:
    logits = f64(0.01, 0.01, 0.01, 0.01, 0.06, 0.90).log()
    assert one_step_greedy(logits.numpy(), 0.055)[4] == pytest.approx(0.04875)
    assert torch.allclose(box_constrained_softmax(logits, 0.055), f64(*[0.055] * 5, 0.725), atol=1e-15)


def test_both_bounds_bind() -> None:
    answer = box_constrained_softmax(f64(-1.5, 1, -0.5), f64(0.15, 0.2, 0.1), f64(1, 0.6, 0.5))
    assert torch.allclose(answer, f64(0.15, 0.60, 0.25), rtol=0, atol=1e-15)


def test_mass_forced_onto_classes_whose_softmax_underflows() -> None:
    logits, upper = torch.tensor([0.0, -200.0, -300.0]), torch.tensor([0.5, 0.9, 0.9])
    assert box_constrained_softmax(logits, None, upper).tolist() == pytest.approx(
        [0.5, 0.5, math.exp(-100) / 2]
    )


def test_bounds_close_to_one_over_k_keep_their_digits() -> None:
    classes = 1000
    logits = torch.randn(4, classes, generator=torch.Generator().manual_seed(3))
    lower, upper = np.float32(1 / classes * (1 - 1e-5)), np.float32(1 / classes * (1 + 1e-5))
    answer = box_constrained_softmax(logits, float(lower), float(upper)).double()
    for row, got in zip(logits.numpy(), answer.numpy(), strict=True):
        wanted, _ = box_bisection(row, np.full(classes, lower), np.full(classes, upper))
        assert np.abs(got / np.array([float(p) for p in wanted]) - 1).max() <= 1e-5


def test_gradient_where_lower_equals_upper() -> None:
    logits = f64(3, 1, 0.2, -1).requires_grad_()
    answer = box_constrained_softmax(logits, f64(0.1, 0.2, 0.05, 0), f64(0.1, 0.2, 0.6, 0.5))
    (jacobian_row,) = torch.autograd.grad(answer[2], logits)
    p = answer.detach()
    product = float(p[2] * p[3] / (p[2] + p[3]))
    assert torch.allclose(jacobian_row, f64(0, 0, product, -product), atol=1e-15)


def test_no_nan_gradient_where_the_lower_bounds_take_all_mass() -> None:
    logits = f64(1, 2, 3).requires_grad_()
    lower = f64(0.5, 0.25, 0.25).requires_grad_()
    answer = box_constrained_softmax(logits, lower)
    assert torch.equal(answer, lower)
    by_logits, by_lower = torch.autograd.grad((answer * f64(1, 10, 100)).sum(), (logits, lower))
    assert by_logits.tolist() == [0, 0, 0]
    assert by_lower.tolist() == [-99, -90, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("classes", [3, 6, 7, 10, 49, 1000])
def test_uniform_bounds_feasible_by_a_hair(classes: int, dtype: torch.dtype) -> None:
    share = torch.full((classes,), 1 / classes, dtype=dtype)
    logits = torch.linspace(-3, 3, classes, dtype=dtype)
    rounding = 4 * classes * torch.finfo(dtype).eps * share.double()
    for bound in (1 / classes, share):
        below, above = (box_constrained_softmax(logits, *box) for box in ((None, bound), (bound,)))
        assert (below <= share).all()
        assert (above >= share).all()
        for answer in (below, above):
            assert ((answer.double() - share.double()).abs() <= rounding).all()
    Bounds(share.double() if dtype is torch.float64 else 1 / classes, 1.0).check(classes)


@pytest.mark.parametrize("entry", [math.nan, math.inf])
def test_a_bad_logit_is_named(entry: float) -> None:
    logits = torch.randn(3, 5, generator=torch.Generator().manual_seed(1))
    logits[1, 2] = entry
    for upper in (None, 0.5, torch.full((5,), 0.5)):
        with pytest.raises(ValueError, match=f"class 2 in row 1 is {entry}"):
            box_constrained_softmax(logits, None, upper)
    negative = np.array([0, 0xFFC00001, 0], dtype=np.uint32).view(np.float32)
    with pytest.raises(ValueError, match="class 1 in row 0 is nan"):
        box_constrained_softmax(torch.from_numpy(negative))


def test_minus_infinity() -> None:
    logits = f64(0, -math.inf, 1)
    assert box_constrained_softmax(logits).tolist() == pytest.approx(
        [1 / (1 + math.e), 0, math.e / (1 + math.e)]
    )
    assert box_constrained_softmax(logits, 0.1)[1] == 0.1
    with pytest.raises(ValueError, match="every logit of row 0 is -inf"):
        box_constrained_softmax(f64(-math.inf, -math.inf))


def test_gradient_survives_a_tiny_free_mass() -> None:
    logits = f64(1, 2, 0).requires_grad_()
    answer = box_constrained_softmax(logits, f64(0, 0, 1 - 1e-9))
    (gradient,) = torch.autograd.grad(answer[0] * 1e9, logits)
    share = 1 / (1 + math.e)
    assert gradient.tolist() == pytest.approx([share * (1 - share), -share * (1 - share), 0], rel=1e-6)


def test_memory_stays_below_three_copies_of_the_logits() -> None:
    logits = torch.randn(64, 100_000)
    upper = torch.rand(64, 100_000)
    box_constrained_softmax(logits[:1], 0.0, upper[:1])
    process = psutil.Process()
    before = process.memory_info().rss
    answer = box_constrained_softmax(logits, 0.0, upper)
    assert process.memory_info().rss - before < 3 * logits.nbytes
    assert answer.shape == logits.shape
