"""The shortest way to a gradient on the CPU: rows that nobody traces or maps, past torch's dispatcher.

`box_softmax` comes here with plain rows that are differentiated. The registered op of `op` gives the same
numbers, but the way there costs a small batch several times its work.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.operator import cpu_kernel
from boxcal.calibrators.operator.op import is_plain


class PlainRows(torch.autograd.Function):
    """`cpu_kernel.forward_plain`, differentiable in the logits and in bounds that are tensors."""

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes arguments by position
        ctx: Any,
        logits: Tensor,
        lower: float | Tensor,
        upper: float | Tensor,
        temperature: float,
        tolerance: float,
    ) -> Tensor:
        """Solve, and keep on which side of its box every class is, and which rows are softmax throughout."""
        side, held = np.empty(logits.shape, np.int8), np.empty(len(logits), np.bool_)
        probabilities = torch.empty(logits.shape, dtype=logits.dtype)
        # A view without a history: an array over the answer itself would keep what leads here alive for ever.
        answer = probabilities.detach().numpy()
        rows, inverse = cpu_kernel.fill_plain(
            logits, lower, upper, temperature, tolerance, answer, side, held
        )
        ctx.save_for_backward(logits, probabilities)
        ctx.arrays = answer, side, held, rows, inverse
        ctx.box = lower, upper, temperature
        return probabilities

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply by the Jacobians; where that may be recorded, by the registered op."""
        logits, probabilities = ctx.saved_tensors  # Refused where somebody has written into them since.
        lower, upper, temperature = ctx.box
        wanted = ctx.needs_input_grad[1:3]
        if is_plain(upstream) and not torch.is_grad_enabled():
            answer, side, held, rows, inverse = ctx.arrays
            found = cpu_kernel.backward_plain(
                upstream, answer, side, held, rows, inverse, lower, upper, wanted
            )
            return *found, None, None
        low, high, divisor = (
            value if isinstance(value, Tensor) else logits.new_full((1, 1), value)
            for value in (lower, upper, temperature)
        )
        by_logits, *others, _ = torch.ops.boxcal.box_softmax_backward(
            upstream.contiguous(), probabilities, torch.from_numpy(ctx.arrays[1]), logits, low, high, divisor,
            [*wanted, False],
        )  # fmt: skip
        by_bounds = [gradient if wants else None for gradient, wants in zip(others, wanted, strict=True)]
        return by_logits, *by_bounds, None, None
