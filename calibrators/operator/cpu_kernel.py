"""The CPU engine: tensors of rows handed to the compiled loops as arrays that share their memory.

Importing it costs numba's import; the loops are compiled once per machine and kept on disk (see `warm`).
"""

import ctypes
import os
from functools import cache, lru_cache
from pathlib import Path
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
from boxcal.calibrators.operator.teams import ALONE

NO_SIDE, NO_HELD = np.empty((1, 0), np.int8), np.empty(0, np.bool_)
"""For callers that need no gradient: it reads which bound holds each class, and which rows have one so."""

MAYBE_HELD: Array = np.ones(1, np.bool_)
"""Any row may have a class on a bound."""

UNWANTED: dict[Any, Array] = {np.dtype(kind): np.empty((0, 0), kind) for kind in (np.float32, np.float64)}
NO_TEMPERATURE: Array = np.empty(0)
"""In place of gradients in a bound, and in the temperature, that are not needed."""

GRAIN = 1 << 15
"""Entries from which on a call is shared among threads, as torch's own loops are."""

PROCESS = os.getpid()
"""A fork of it has none of its threads, and would wait for them for ever."""

MASKS = {(lower, upper): GradientMask(lower, upper) for lower in (False, True) for upper in (False, True)}

Bound = float | Tensor
"""A number, or a tensor of shape (N or 1, K)."""


@cache
def _openmp() -> int:
    """Where `GOMP_parallel` is, which runs a loop in the threads of torch's OpenMP library, or 0."""
    for path in (Path(torch.__file__).parent / "lib").glob("lib*omp*"):
        if (function := getattr(ctypes.CDLL(str(path)), "GOMP_parallel", None)) is not None:
            return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def _team(rows: Array) -> tuple[int, int]:
    """Who shares a call, as `teams.share` takes it: no row depends on another, so that no answer changes.

    In a thread that torch keeps to one, as those of a service and of a fit, the loop runs there.
    """
    if rows.size < GRAIN or os.getpid() != PROCESS or (parts := min(len(rows), torch.get_num_threads())) == 1:
        return ALONE
    return (address, parts) if (address := _openmp()) else ALONE


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
    rows = _array(logits)
    probabilities = np.empty_like(rows)
    box, inverse = _box(lower, upper, rows), _number(1.0 / temperature, np.float64)
    _fill(rows, box, inverse, tolerance, probabilities, NO_SIDE, NO_HELD)
    return torch.from_numpy(probabilities)


def _box(lower: Bound, upper: Bound, rows: Array) -> tuple[Array, Array]:
    """Bounds as the loops take them: two arrays of shape (N or 1, K), or (1,) for numbers."""
    if isinstance(lower, Tensor) and isinstance(upper, Tensor):
        return _array(lower), _array(upper)
    return _number(lower, rows.dtype), _number(upper, rows.dtype)


@lru_cache(64)
def _number(value: float, kind: Any) -> Array:
    """Give a number as the loops take it, which only read it."""
    return np.array([value], kind)


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
    team = _team(rows)
    if (refused := forward_rows(rows, *box, inverse, tolerance, probabilities, side, held, team)) >= 0:
        lower, upper = (bound.reshape(len(bound), -1) for bound in box)
        raise_for_row(rows, lower, upper, tolerance, refused)


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
    given = upstream, probabilities, side, held, logits, inverse
    backward_rows(*given, out, by_lower, by_upper, by_temperature, _team(out))
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
    return (values.detach() if values.requires_grad else values).contiguous().numpy()


def _inverse(temperature: Tensor) -> Array:
    """One over each row's temperature, in float64."""
    values = temperature.detach().numpy().astype(np.float64).reshape(-1)
    if not (values.min() > 0.0 and values.max() < np.inf):
        row = int(np.argmin((values > 0.0) & (values < np.inf)))
        raise ValueError(f"temperature {values[row]:.9g} of row {row} is not a positive number")
    return 1.0 / values
