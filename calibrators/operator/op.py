"""The operator as torch knows it: `torch.ops.boxcal.box_softmax` on rows, its gradient, the choice of engine.

`box_softmax` brings arguments of any shape to rows; below stand the engines. A registered op is opaque to
`torch.compile` and `torch.export`, which see only what its fake form says about shapes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from boxcal.calibrators.operator.checks import check_values
from boxcal.calibrators.operator.gradients import GradientMask, jacobian_products
from boxcal.calibrators.operator.torch_solver import solve

ONCE = "the box-constrained softmax is differentiable once, not twice"

Rows = tuple[Tensor, Tensor]
"""Probabilities (N, K), and the int8 side of its box on which every class is."""


@torch.library.custom_op("boxcal::box_softmax", mutates_args=())
def box_softmax(logits: Tensor, lower: Tensor, upper: Tensor, temperature: Tensor, tolerance: float) -> Rows:
    """Solve rows: logits (N, K), bounds (N or 1, K or 1), temperature (N or 1, 1), of one dtype."""
    if not logits.numel():
        return torch.empty_like(logits), torch.empty_like(logits, dtype=torch.int8)
    if logits.device.type == "cpu":
        from boxcal.calibrators.operator import cpu_kernel  # noqa: PLC0415 - numba loads when it is first needed

        return cpu_kernel.forward(logits, lower, upper, temperature, tolerance)
    if logits.device.type == "cuda":
        from boxcal.calibrators.operator import cuda_kernel  # noqa: PLC0415 - so does Triton

        return cuda_kernel.forward(logits, lower, upper, temperature, tolerance)
    check_values(logits, lower, upper, tolerance)
    probabilities, side = solve(logits, lower, upper, temperature)
    return probabilities.to(logits.dtype), side


def _differentiate(  # noqa: PLR0917 - an op's arguments have positions
    upstream: Tensor,
    probabilities: Tensor,
    side: Tensor,
    logits: Tensor,
    lower: Tensor,
    upper: Tensor,
    temperature: Tensor,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients in logits, lower, upper and temperature, each of its argument's shape."""
    products = jacobian_products
    if logits.device.type == "cpu":
        from boxcal.calibrators.operator import cpu_kernel  # noqa: PLC0415 - numba loads when it is first needed

        products = cpu_kernel.backward
    arguments = (upstream, probabilities, side, logits, lower, upper, temperature)
    found = products(*arguments, GradientMask(*wanted))
    return found.logits, found.lower, found.upper, found.temperature


box_softmax_backward = torch.library.custom_op(
    "boxcal::box_softmax_backward", _differentiate, mutates_args=()
)


@box_softmax.register_fake
def _fake_forward(
    logits: Tensor, _lower: Tensor, _upper: Tensor, _temperature: Tensor, _tolerance: float
) -> Rows:
    shape = logits.shape
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int8)


@box_softmax_backward.register_fake
def _fake_backward(
    _upstream: Tensor,
    _probabilities: Tensor,
    _side: Tensor,
    logits: Tensor,
    lower: Tensor,
    upper: Tensor,
    temperature: Tensor,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    others = [
        like.new_empty(like.shape if wants else (0,))
        for like, wants in zip((lower, upper, temperature), wanted, strict=True)
    ]
    return logits.new_empty(logits.shape), others[0], others[1], others[2]


def is_plain(rows: Tensor) -> bool:
    """Whether nobody traces, maps or differentiates forwards.

    The dispatcher, dearer than a small batch, may then be left out.
    """
    return (
        not torch.compiler.is_compiling()
        and type(rows) is Tensor
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and forward_ad._current_level < 0
    )


def refuse_forward_mode(*arguments: Any) -> None:
    """Raise NotImplementedError where a dual tensor would lose its tangent unnoticed."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    unpack_dual: Any = forward_ad.unpack_dual
    for argument in arguments:
        if isinstance(argument, Tensor) and unpack_dual(argument).tangent is not None:
            raise NotImplementedError("the box-constrained softmax has no forward-mode derivative")


def _save(ctx: Any, inputs: tuple[Any, ...], output: Rows) -> None:
    ctx.save_for_backward(*output, *inputs[:4])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, upstream: Tensor, _side: None) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[1:4])
    differentiate: Any = torch.ops.boxcal.box_softmax_backward
    if not torch.is_grad_enabled() and is_plain(upstream):
        differentiate = _differentiate
    gradients = differentiate(upstream.contiguous(), *ctx.saved_tensors, wanted)
    others = [gradient if wants else None for gradient, wants in zip(gradients[1:], wanted, strict=True)]
    return gradients[0], *others, None


def _refuse_second(_ctx: Any, *_upstream: Tensor) -> None:
    raise NotImplementedError(ONCE)


box_softmax.register_autograd(_backward, setup_context=_save)
box_softmax_backward.register_autograd(_refuse_second)
