"""The operator under `torch.func`: how its ops are mapped over samples and differentiated in a transform.

`box_softmax` comes through here; outside `vmap`, `grad` and their like the ops of `op` are called directly.
"""

from typing import Any

import torch
from torch import Tensor

from boxcal.calibrators.operator.op import ONCE, Rows, box_softmax, box_softmax_backward


def solve_rows(logits: Tensor, lower: Tensor, upper: Tensor, temperature: Tensor, tolerance: float) -> Rows:
    """Call the op, by way of a function that transforms understand while one is active."""
    if _inside_a_transform():
        found: Rows = _Solve.apply(logits, lower, upper, temperature, tolerance)
        return found
    probabilities, side = torch.ops.boxcal.box_softmax(logits, lower, upper, temperature, tolerance)
    return probabilities, side


def _inside_a_transform() -> bool:
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _differentiate_rows(*arguments: Any) -> tuple[Tensor, ...]:
    call = _Differentiate.apply if _inside_a_transform() else torch.ops.boxcal.box_softmax_backward
    found: tuple[Tensor, ...] = call(*arguments)
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
    """Lay the mapped axis into the rows: every sample's rows follow the rows of the sample before."""
    leading = [
        argument[None] if dim is None else argument.movedim(dim, 0)
        for argument, dim in zip(arguments, in_dims, strict=False)
    ]
    size = max(argument.shape[1] for argument in leading)
    merged = [
        argument
        if argument.shape[:2] == (1, 1) and not full
        else argument.expand(count, size, -1).flatten(0, 1)
        for argument in leading
    ]
    merged = [argument[0] if argument.ndim == 3 else argument for argument in merged]
    return merged, (count, size)


box_softmax.register_vmap(_map_forward)
box_softmax_backward.register_vmap(_map_backward)


class _Solve(torch.autograd.Function):
    """`box_softmax` in the form that `torch.func` asks for."""

    @staticmethod
    def forward(*arguments: Any) -> Rows:
        probabilities, side = torch.ops.boxcal.box_softmax(*arguments)
        return probabilities, side

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Rows) -> None:
        ctx.save_for_backward(*output, *inputs[:4])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _side: None) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad[1:4])
        found = _Differentiate.apply(upstream, *ctx.saved_tensors, wanted)
        others = [gradient if wants else None for gradient, wants in zip(found[1:], wanted, strict=True)]
        return found[0], *others, None

    vmap = staticmethod(_map_forward)


class _Differentiate(torch.autograd.Function):
    """`box_softmax_backward` in the form that `torch.func` asks for."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = torch.ops.boxcal.box_softmax_backward(*arguments)
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep nothing: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> None:
        raise NotImplementedError(ONCE)

    vmap = staticmethod(_map_backward)
