"""The analytic gradient: finite differences, the closed-form Jacobian, and its conventions at kinks."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from boxcal.calibrators.operator import box_constrained_softmax, cpu_kernel
from boxcal.calibrators.operator.gradients import GradientMask, jacobian_products

SEED = 7


def draw(rows: int, classes: int, *, seed: int = SEED) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(rows, classes, generator=random, dtype=torch.float64)
    lower = torch.rand(rows, classes, generator=random, dtype=torch.float64) / (2 * classes)
    upper = lower + 3 * torch.rand(rows, classes, generator=random, dtype=torch.float64) / classes
    return logits, lower, (upper * (1.5 / upper.sum(-1, keepdim=True)).clamp(min=1)).clamp(max=1)


@pytest.mark.parametrize("bound_shape", ["scalar", "classes", "rows", "full"])
def test_finite_differences(bound_shape: str) -> None:
    logits, lower, upper = draw(5, 7)
    lower, upper = {
        "scalar": (lower.min(), upper.max() * 0 + 0.3),
        "classes": (lower.amin(0), upper.amax(0)),
        "rows": (lower.amin(1, keepdim=True), upper.amin(1, keepdim=True) * 0 + 0.35),
        "full": (lower, upper),
    }[bound_shape]
    temperature = torch.rand(5, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 0.5
    arguments = tuple(
        value.detach().clone().requires_grad_() for value in (logits, lower, upper, temperature)
    )
    assert torch.autograd.gradcheck(
        lambda g, a, b, t: box_constrained_softmax(g, a, b, temperature=t), arguments
    )


def test_closed_form_jacobian() -> None:
    logits, lower, upper = (part[0] for part in draw(1, 9))
    p = box_constrained_softmax(logits, lower, upper)
    at_lower, at_upper = (p == lower).double(), (p == upper).double()
    assert at_lower.any()
    assert at_upper.any()
    free = p * (1 - at_lower) * (1 - at_upper)
    mass = free.sum()
    wanted = [free.diag() - torch.outer(free, free) / mass]
    wanted += [mask.diag() - torch.outer(free, mask) / mass for mask in (at_lower, at_upper)]
    found = torch.func.jacrev(box_constrained_softmax, argnums=(0, 1, 2))(logits, lower, upper)
    for got, want in zip(found, wanted, strict=True):
        assert torch.allclose(got, want, atol=1e-15)


def test_engines_agree_on_every_gradient() -> None:
    logits, lower, upper = draw(40, 11)
    temperature = torch.full((1, 1), 0.7, dtype=torch.float64)
    upstream = torch.randn(40, 11, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    p, side = cpu_kernel.forward(logits, lower, upper, temperature, 1e-12)
    arguments = (upstream, p, side, logits, lower, upper, temperature, GradientMask(True, True, True))
    for got, want in zip(cpu_kernel.backward(*arguments), jacobian_products(*arguments), strict=True):
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-15)


def test_a_class_on_both_bounds_follows_the_side_its_value_lies_beyond() -> None:
    logits = torch.tensor([3.0, -2.0, 0.2, -1.0], dtype=torch.float64)
    lower = torch.tensor([0.1, 0.45, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    upper = torch.tensor([0.1, 0.45, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    answer = box_constrained_softmax(logits, lower, upper)
    by_lower, by_upper = torch.autograd.grad((answer * torch.tensor([1.0, 2, 0, 0])).sum(), (lower, upper))
    assert by_upper.tolist() == pytest.approx([1.0, 0.0, 0.0, 0.0])
    assert by_lower.tolist() == pytest.approx([0.0, 2.0, 0.0, 0.0])
    step = 1e-6
    loosened = box_constrained_softmax(logits, lower, upper.detach() + torch.tensor([step, 0, 0, 0]))
    assert ((loosened - answer)[0] / step).item() == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize(
    ("logits", "side", "bounds", "loosened", "step", "near"),
    [
        pytest.param(
            [1, 2, 0.5], "upper", [0.2, 0.5, 0.3], [0, 1, 2], 1e-7, {"abs": 1e-4}, id="no free mass"
        ),
        pytest.param([0, 1, 2], "lower", [1, 0, 0], [0], -1e-7, {"rel": 1e-6}, id="free classes of no mass"),
    ],
)
def test_the_derivative_is_that_for_loosened_bounds(
    *, logits: Any, side: str, bounds: Any, loosened: list[int], step: float, near: dict[str, Any]
) -> None:
    rows = torch.tensor(logits, dtype=torch.float64)
    given: Any = torch.tensor(bounds, dtype=torch.float64, requires_grad=True)
    weights = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    answer = box_constrained_softmax(rows, **{side: given})
    (gradient,) = torch.autograd.grad((answer * weights).sum(), given)
    for index in loosened:
        moved = given.detach().clone()
        moved[index] += step
        slope = (box_constrained_softmax(rows, **{side: moved}) - answer) @ weights / step
        assert gradient[index].item() == pytest.approx(slope.item(), **near)


def test_where_nothing_can_move_every_gradient_is_zero() -> None:
    fixed = torch.tensor([0.25, 0.75], dtype=torch.float64)
    arguments = [torch.tensor([1.0, 2.0], dtype=torch.float64), fixed.clone(), fixed.clone()]
    for argument in arguments:
        argument.requires_grad_()
    answer = box_constrained_softmax(*arguments)
    for gradient in torch.autograd.grad((answer * torch.tensor([1.0, 5.0])).sum(), arguments):
        assert gradient.tolist() == [0.0, 0.0]


def test_twice_is_refused_in_words() -> None:
    logits = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        (box_constrained_softmax(logits, 0.1, 0.5) ** 2).sum(), logits, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="once, not twice"):
        torch.autograd.grad(gradient.sum(), logits)


@pytest.mark.parametrize("which", ["logits", "answer"])
def test_what_the_gradient_needs_must_not_be_written_over(which: str) -> None:
    leaf = torch.randn(2, 3, requires_grad=True)
    logits = leaf * 1.0
    answer = box_constrained_softmax(logits, 0.1, 0.5)
    (logits if which == "logits" else answer).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(answer.sum(), leaf)


def test_what_the_gradient_needs_is_let_go_with_the_answer() -> None:
    logits = torch.randn(2, 3, requires_grad=True)
    answer = box_constrained_softmax(logits, 0.1, 0.5)
    kept = weakref.ref(answer.grad_fn)
    del answer
    assert kept() is None


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:FutureWarning")  # torch's own decompositions
def test_forward_mode_is_refused_in_words() -> None:
    logits = torch.randn(2, 3, dtype=torch.float64)
    make_dual: Any = forward_ad.make_dual
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        box_constrained_softmax(make_dual(logits, torch.ones_like(logits)), 0.1, 0.5)
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.func.jvp(lambda g: box_constrained_softmax(g, 0.1, 0.5), (logits,), (torch.ones_like(logits),))


@pytest.mark.parametrize("shape", [(4, 11), (1, 11), (11,)])
def test_the_short_way_gives_the_registered_ops_gradients(shape: tuple[int, ...]) -> None:
    logits, lower, upper = draw(4, 11)
    lower, upper = (
        part.reshape(-1, 11)[: shape[0] if len(shape) == 2 else 1].reshape(shape).contiguous()
        for part in (lower, upper)
    )
    upstream = torch.randn(4, 11, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = []
    for temperature in (0.7, torch.full((1, 1), 0.7, dtype=torch.float64)):
        leaves = [part.detach().clone().requires_grad_() for part in (logits, lower, upper)]
        answer = box_constrained_softmax(*leaves, temperature=temperature)
        found.append([answer, *torch.autograd.grad(answer, leaves, upstream)])
    for short, long in zip(*found, strict=True):
        assert torch.equal(short, long)


def test_rows_that_no_bound_holds_have_the_gradient_of_a_softmax() -> None:
    logits, _, _ = draw(30, 11)
    upstream = torch.randn(30, 11, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    bound = logits.softmax(-1).amax(-1).median()
    found = []
    for upper in (float(bound), bound.expand(30, 11).contiguous().requires_grad_()):
        rows = logits.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(box_constrained_softmax(rows, 0.0, upper), rows, upstream)
        found.append(gradient)
    assert torch.allclose(found[0], found[1], rtol=1e-12, atol=1e-16)
    rows = logits.clone().requires_grad_()
    (softmax,) = torch.autograd.grad(rows.softmax(-1), rows, upstream)
    inside = logits.softmax(-1).amax(-1) <= bound
    assert 10 < inside.sum() < 20
    assert torch.allclose(found[0][inside], softmax[inside], rtol=1e-12, atol=1e-16)
