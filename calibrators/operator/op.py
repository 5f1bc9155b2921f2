"""The operator as torch knows it: two registered ops on rows, their derivatives, and the choice of engine.

`box_softmax` brings arguments of any shape to rows; below stand the engines. A registered op is opaque to
`torch.compile` and `torch.export`, which see only its fake form.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from boxcal.calibrators.operator.bounds import is_plain
from boxcal.calibrators.operator.gradients import GradientMask, Gradients, jacobian_products

Rows = tuple[Tensor, Tensor]
"""Probabilities (N, K), and int8 (N, K): which bound holds each class."""


@torch.library.custom_op("boxcal::box_softmax", mutates_args=())
def box_softmax(logits: Tensor, lower: Tensor, upper: Tensor, temperature: Tensor, tolerance: float) -> Rows:
    """Solve rows: logits (N, K), bounds (N or 1, K or 1), temperature (N or 1, 1), of one dtype."""
    if not logits.numel():
        return torch.empty_like(logits), torch.empty_like(logits, dtype=torch.int8)
    if logits.device.type == "cuda":
        from boxcal.calibrators.operator import cuda_kernel  # noqa: PLC0415 - Triton loads when first needed

        return cuda_kernel.forward(logits, lower, upper, temperature, tolerance)
    from boxcal.calibrators.operator import cpu_kernel  # noqa: PLC0415 - so does numba

    probabilities, side = cpu_kernel.forward(
        logits.cpu(), lower.cpu(), upper.cpu(), temperature.cpu(), tolerance
    )
    return probabilities.to(logits.device), side.to(logits.device)


def _differentiate(  # noqa: PLR0917 - an op's arguments have positions
    upstream: Tensor,
    probabilities: Tensor,
    side: Tensor,
    logits: Tensor,
    lower: Tensor,
    upper: Tensor,
    temperature: Tensor,
    mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients in logits, lower, upper and temperature, each of its argument's shape."""
    arguments = (upstream, probabilities, side, logits, lower, upper, temperature)
    if logits.device.type == "cuda":
        return jacobian_products(*arguments, GradientMask(*mask))
    from boxcal.calibrators.operator import cpu_kernel  # noqa: PLC0415 - numba loads when first needed

    backward: Any = cpu_kernel.backward
    found = backward(*(argument.cpu() for argument in arguments), GradientMask(*mask))
    by_logits, *others = (gradient.to(logits.device) for gradient in found)
    return by_logits, others[0], others[1], others[2]


box_softmax_backward = torch.library.custom_op(
    "boxcal::box_softmax_backward", _differentiate, mutates_args=()
)


@box_softmax.register_fake
def _fake_forward(logits: Tensor, *_others: Any) -> Rows:
    return logits.new_empty(logits.shape), logits.new_empty(logits.shape, dtype=torch.int8)


@box_softmax_backward.register_fake
def _fake_backward(*arguments: Any) -> Gradients:
    *_, logits, lower, upper, temperature, mask = arguments
    wanted = zip((logits, lower, upper, temperature), (True, *mask), strict=True)
    found = [like.new_empty(like.shape if wants else (0,)) for like, wants in wanted]
    return found[0], found[1], found[2], found[3]


def refuse_forward_mode(*arguments: Any) -> None:
    """Raise NotImplementedError where a dual tensor would lose its tangent unnoticed."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return
    unpack_dual: Any = forward_ad.unpack_dual
    for argument in arguments:
        if isinstance(argument, Tensor) and unpack_dual(argument).tangent is not None:
            raise NotImplementedError("the box-constrained softmax has no forward-mode derivative")


def solve_rows(logits: Tensor, lower: Tensor, upper: Tensor, temperature: Tensor, tolerance: float) -> Rows:
    """Call the op; inside `torch.func` transforms, through the function that they can differentiate."""
    arguments = (logits, lower, upper, temperature, tolerance)
    found: Rows = _Solve.apply(*arguments) if _is_transformed() else torch.ops.boxcal.box_softmax(*arguments)
    return found


def _is_transformed() -> bool:
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _differentiate_rows(*arguments: Any) -> Gradients:
    call: Any = torch.ops.boxcal.box_softmax_backward
    if _is_transformed():
        call = _Differentiate.apply
    elif not torch.is_grad_enabled() and is_plain(arguments[0]):
        call = _differentiate
    found: Gradients = call(arguments[0].contiguous(), *arguments[1:])
    return found


def _map_forward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Rows, tuple[int, int]]:
    """Solve the rows of all samples in one call."""
    rows, (count, size) = _merge(info.batch_size, in_dims, arguments[:4])
    probabilities, side = solve_rows(rows[0], rows[1], rows[2], rows[3], arguments[4])
    return (probabilities.reshape(count, size, -1), side.reshape(count, size, -1)), (0, 0)


def _map_backward(
    info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int, int, int, int]]:
    """Differentiate the rows of all samples in one call; what a sample's rows share is summed within it."""
    rows, (count, size) = _merge(info.batch_size, in_dims, arguments[:7], full=True)
    found = _differentiate_rows(*rows, arguments[7])
    per_sample = []
    for gradient, argument, dim in zip(found, arguments[3:7], in_dims[3:7], strict=True):
        own = argument.shape[0] if dim is None else argument.movedim(dim, 0).shape[1]
        split = gradient.reshape(count, size, -1) if gradient.numel() else gradient.expand(count, 0)
        per_sample.append(split.sum(1, keepdim=True) if own == 1 and size > 1 and gradient.numel() else split)
    return tuple(per_sample), (0, 0, 0, 0)


def _merge(
    count: int, in_dims: tuple[int | None, ...], arguments: tuple[Tensor, ...], *, full: bool = False
) -> tuple[list[Tensor], tuple[int, int]]:
    """Merge the mapped axis into the rows: every sample's rows follow the rows of the sample before."""
    leading = [
        argument[None] if dim is None else argument.movedim(dim, 0)
        for argument, dim in zip(arguments, in_dims, strict=False)
    ]
    size = max(argument.shape[1] for argument in leading)
    merged = [
        argument[0]
        if argument.shape[:2] == (1, 1) and not full
        else argument.expand(count, size, -1).flatten(0, 1)
        for argument in leading
    ]
    return merged, (count, size)


class _Solve(torch.autograd.Function):
    """`box_softmax` in the form that `torch.func` requires."""

    vmap = staticmethod(_map_forward)

    @staticmethod
    def forward(*arguments: Any) -> Rows:
        found: Rows = torch.ops.boxcal.box_softmax(*arguments)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Rows) -> None:
        ctx.save_for_backward(*output, *inputs[:4])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _side: None) -> tuple[Tensor | None, ...]:
        mask = list(ctx.needs_input_grad[1:4])
        by_logits, *others = _differentiate_rows(upstream, *ctx.saved_tensors, mask)
        return by_logits, *(g if wants else None for g, wants in zip(others, mask, strict=True)), None


class _Differentiate(torch.autograd.Function):
    """`box_softmax_backward` in that form; it has no derivative of its own."""

    vmap = staticmethod(_map_backward)

    @staticmethod
    def forward(*arguments: Any) -> Gradients:
        found: Gradients = torch.ops.boxcal.box_softmax_backward(*arguments)
        return found

    @staticmethod
    def setup_context(_ctx: Any, _inputs: tuple[Any, ...], _output: Gradients) -> None: ...

    @staticmethod
    def backward(_ctx: Any, *_upstream: Tensor) -> None:
        raise NotImplementedError("the box-constrained softmax is differentiable once, not twice")


box_softmax.register_vmap(_map_forward)
box_softmax_backward.register_vmap(_map_backward)
box_softmax.register_autograd(_Solve.backward, setup_context=_Solve.setup_context)
box_softmax_backward.register_autograd(_Differentiate.backward)
