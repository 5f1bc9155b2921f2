"""The CPU engine: tensors of rows handed to the compiled loops as arrays that share their memory.

Importing it costs numba's import; the loops are compiled once per machine and kept on disk (see `warm`).
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.operator.bounds import is_plain
from boxcal.calibrators.operator.checks import raise_for_row
from boxcal.calibrators.operator.cpu_backward import backward_rows
from boxcal.calibrators.operator.cpu_loops import forward_rows
from boxcal.calibrators.operator.exact_row import Array
from boxcal.calibrators.operator.gradients import GradientMask, Gradients

NO_SIDE: Array = np.empty((1, 0), np.int8)
"""For callers that need no gradient, which reads the side of its box each class is on."""

NO_HELD: Array = np.empty(0, np.bool_)
"""Likewise for the rows in which bounds hold any class."""

MAYBE_HELD: Array = np.ones(1, np.bool_)
"""Any row may have a class on a bound."""

UNWANTED: dict[Any, Array] = {np.dtype(kind): np.empty((0, 0), kind) for kind in (np.float32, np.float64)}
"""In place of a bound's gradient that is not needed."""

NO_TEMPERATURE: Array = np.empty(0)
"""In place of the temperature's."""

GRAIN = 1 << 18
"""Entries that are worth a thread: a quarter of a millisecond, of which its start takes a third."""

MASKS = {(lower, upper): GradientMask(lower, upper) for lower in (False, True) for upper in (False, True)}

Bound = float | Tensor
"""A number, or a tensor of shape (N or 1, K)."""


@cache
def _pool(_process: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="operator")


def over_threads(loop: Callable[..., Any], *arguments: Any) -> list[tuple[int, Any]]:
    """Call a loop over rows for a range of rows in each thread, and give the first row and answer of each.

    The ranges change no answer, since no row depends on another. There are as many as torch has threads: in a
    thread that torch keeps to one, as those of a service and of a fit, the loop runs there.
    """
    rows, worth = len(arguments[0]), arguments[0].size // GRAIN
    if worth <= 1 or (count := min(rows, worth, torch.get_num_threads())) == 1:
        return [(0, loop(*arguments))]
    edges = [rows * part // count for part in range(count + 1)]

    def work(begin: int, end: int) -> tuple[int, Any]:
        own = (each[begin:end] if np.ndim(each) and len(each) == rows else each for each in arguments)
        return begin, loop(*own)

    others = [_pool(os.getpid()).submit(work, *ends) for ends in pairwise(edges[1:])]
    return [work(*edges[:2]), *(other.result() for other in others)]


def forward(
    logits: Tensor, lower: Tensor, upper: Tensor, temperature: Tensor, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Solve rows of float32 or float64; shapes and values as `checks.check_values` has them."""
    rows, columns = logits.detach().contiguous(), logits.shape[1]
    if lower.shape[1] == upper.shape[1] == 1:
        low, high = _array(lower)[:, 0], _array(upper)[:, 0]
    else:
        low, high = _array(lower.expand(-1, columns)), _array(upper.expand(-1, columns))
    probabilities, side = torch.empty_like(rows), np.empty(logits.shape, np.int8)
    _fill(rows.numpy(), (low, high), _inverse(temperature), tolerance, probabilities.numpy(), side, NO_HELD)
    return probabilities, torch.from_numpy(side)


def forward_plain(logits: Tensor, lower: Bound, upper: Bound, temperature: float, tolerance: float) -> Tensor:
    """Solve rows that need no gradient, with as little around the loops as can be.

    Bounds are two numbers, or two tensors of shape (N or 1, K) and of the logits' dtype.
    """
    rows = logits.detach().contiguous()
    probabilities, array = torch.empty_like(rows), rows.numpy()
    box, inverse = _box(lower, upper, array), np.array([1.0 / temperature])
    _fill(array, box, inverse, tolerance, probabilities.numpy(), NO_SIDE, NO_HELD)
    return probabilities


def _box(lower: Bound, upper: Bound, rows: Array) -> tuple[Array, Array]:
    """Bounds as the loops take them: two arrays of shape (N or 1, K), or (1,) for numbers."""
    if isinstance(lower, Tensor) and isinstance(upper, Tensor):
        return _array(lower), _array(upper)
    return np.array([lower], rows.dtype), np.array([upper], rows.dtype)


def _fill(  # noqa: PLR0917 - the order of the operator's own arguments
    rows: Array,
    box: tuple[Array, Array],
    inverse: Array,
    tolerance: float,
    probabilities: Array,
    side: Array,
    held: Array,
) -> None:
    """Fill the answer and what its gradient needs, or raise for the row that has none."""
    for begin, refused in over_threads(
        forward_rows, rows, *box, inverse, tolerance, probabilities, side, held
    ):
        if refused >= 0:
            lower, upper = (bound.reshape(len(bound), -1) for bound in box)
            raise_for_row(rows, lower, upper, tolerance, begin + refused)


class DifferentiableRows(torch.autograd.Function):
    """`forward_plain`, differentiable in the logits and in bounds that are tensors.

    The registered op gives the same numbers, but torch's dispatcher costs a small batch several times its
    work.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - torch passes arguments by position
        ctx: Any, logits: Tensor, lower: Bound, upper: Bound, temperature: float, tolerance: float
    ) -> Tensor:
        """Solve, and keep on which side of its box every class is, and which rows are softmax throughout."""
        side, held = np.empty(logits.shape, np.int8), np.empty(len(logits), np.bool_)
        rows, inverse = _array(logits), np.array([1.0 / temperature])
        probabilities = torch.empty(logits.shape, dtype=logits.dtype)
        # A view without a history: an array over the answer itself would keep what leads here alive for ever.
        answer = probabilities.detach().numpy()
        _fill(rows, _box(lower, upper, rows), inverse, tolerance, answer, side, held)
        ctx.save_for_backward(logits, probabilities)
        ctx.arrays = answer, side, held, rows, inverse
        ctx.box = (lower, upper), temperature
        return probabilities

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply by the Jacobians; where that may be recorded, by the registered op."""
        logits, probabilities = ctx.saved_tensors  # Refused if they were modified since.
        box, temperature = ctx.box
        mask = MASKS[ctx.needs_input_grad[1:3]]
        if is_plain(upstream) and not torch.is_grad_enabled():
            answer, side, held, rows, inverse = ctx.arrays
            found = _products(upstream.contiguous().numpy(), answer, side, held, rows, inverse, box, mask)
        else:
            low, high, divisor = (
                value if isinstance(value, Tensor) else logits.new_full((1, 1), value)
                for value in (*box, temperature)
            )
            found = torch.ops.boxcal.box_softmax_backward(
                upstream.contiguous(), probabilities, torch.from_numpy(ctx.arrays[1]), logits,
                low, high, divisor, list(mask),
            )  # fmt: skip
        return found[0], found[1] if mask.lower else None, found[2] if mask.upper else None, None, None


def backward(  # noqa: PLR0917 - the order of the operator's own arguments
    upstream: Tensor,
    probabilities: Tensor,
    side: Tensor,
    logits: Tensor,
    lower: Tensor,
    upper: Tensor,
    temperature: Tensor,
    mask: GradientMask,
) -> Gradients:
    """Gradients in logits, lower, upper and temperature; an empty tensor where none is asked for."""
    rows, inverse = _array(logits), _inverse(temperature)
    found = _products(
        _array(upstream), _array(probabilities), side.numpy(), MAYBE_HELD, rows, inverse, (lower, upper), mask
    )
    by_logits, *others = (logits.new_empty(0) if gradient is None else gradient for gradient in found)
    if mask.temperature:
        others[2] = others[2][:, None].sum_to_size(temperature.shape).to(temperature.dtype)
    return by_logits, others[0], others[1], others[2]


def _products(  # noqa: PLR0917 - as above
    upstream: Array,
    probabilities: Array,
    side: Array,
    held: Array,
    logits: Array,
    inverse: Array,
    box: Any,
    mask: GradientMask,
) -> tuple[Tensor | None, ...]:
    """Gradients in logits, lower, upper and each row's temperature; None where none is asked for."""
    by_logits = torch.from_numpy(np.empty_like(upstream))
    out: Array = by_logits.numpy()
    none = UNWANTED[out.dtype]
    by_lower = np.empty((len(out), box[0].shape[1]), out.dtype) if mask.lower else none
    by_upper = np.empty((len(out), box[1].shape[1]), out.dtype) if mask.upper else none
    by_temperature = np.empty(len(out)) if mask.temperature else NO_TEMPERATURE
    over_threads(
        backward_rows,
        upstream,
        probabilities,
        side,
        held,
        logits,
        inverse,
        out,
        by_lower,
        by_upper,
        by_temperature,
    )
    if not (mask.lower or mask.upper or mask.temperature):
        return by_logits, None, None, None
    return (
        by_logits,
        torch.from_numpy(by_lower).sum_to_size(box[0].shape) if mask.lower else None,
        torch.from_numpy(by_upper).sum_to_size(box[1].shape) if mask.upper else None,
        torch.from_numpy(by_temperature) if mask.temperature else None,
    )


def _array(values: Tensor) -> Array:
    """Give numpy the tensor's memory, copying only what is not stored row by row."""
    return values.detach().contiguous().numpy()


def _inverse(temperature: Tensor) -> Array:
    """One over each row's temperature, in float64."""
    values = temperature.detach().numpy().astype(np.float64).reshape(-1)
    if not (values.min() > 0.0 and values.max() < np.inf):
        row = int(np.argmin((values > 0.0) & (values < np.inf)))
        raise ValueError(f"temperature {values[row]:.9g} of row {row} is not a positive number")
    return 1.0 / values
