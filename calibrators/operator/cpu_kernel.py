"""The CPU engine: tensors of rows handed to the fused loops as arrays that share their memory.

Importing it costs numba's import; the loops are compiled once per machine and kept on disk (see `warm`).
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from boxcal.calibrators.operator.checks import raise_for_row
from boxcal.calibrators.operator.cpu_backward import backward_rows
from boxcal.calibrators.operator.cpu_loops import forward_rows
from boxcal.calibrators.operator.exact_row import Array
from boxcal.calibrators.operator.gradients import GradientMask, Gradients

NO_SIDE: Array = np.empty((1, 0), np.int8)
"""For those who will not ask for the gradient, which needs to know the side of its box each class is on."""

NO_HELD: Array = np.empty(0, np.bool_)
"""Likewise for the rows in which bounds hold any class."""

MAYBE_HELD: Array = np.ones(1, np.bool_)
"""Where nobody remembers which rows those are."""

UNWANTED: dict[Any, Array] = {np.dtype(kind): np.empty((0, 0), kind) for kind in (np.float32, np.float64)}
"""The place of a bound's gradient that nobody needs."""

NO_TEMPERATURE: Array = np.empty(0)
"""The place of the temperature's."""


def forward(
    logits: Tensor, lower: Tensor, upper: Tensor, temperature: Tensor, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Solve rows of float32 or float64; shapes and values as `checks.check_values` has them."""
    if lower.shape[1] == upper.shape[1] == 1:
        low, high = _array(lower)[:, 0], _array(upper)[:, 0]
    else:
        low, high = _array(lower.expand(-1, logits.shape[1])), _array(upper.expand(-1, logits.shape[1]))
    probabilities = torch.empty(logits.shape, dtype=logits.dtype)
    side = torch.empty(logits.shape, dtype=torch.int8)
    refused = forward_rows(
        _array(logits),
        low,
        high,
        _inverse(temperature),
        tolerance,
        probabilities.numpy(),
        side.numpy(),
        NO_HELD,
    )
    if refused >= 0:
        raise_for_row(logits, lower, upper, tolerance, refused)
    return probabilities, side


def forward_plain(
    logits: Tensor,
    lower: float | Tensor,
    upper: float | Tensor,
    temperature: float,
    tolerance: float,
) -> Tensor:
    """Solve rows that nobody traces or maps, with as little around the loops as can be.

    Bounds are two numbers, or two tensors of shape (N or 1, K), of the logits' dtype.
    """
    probabilities = torch.empty(logits.shape, dtype=logits.dtype)
    fill_plain(logits, lower, upper, temperature, tolerance, probabilities.numpy(), NO_SIDE, NO_HELD)
    return probabilities


def fill_plain(  # noqa: PLR0917 - the order of the operator's own arguments
    logits: Tensor,
    lower: float | Tensor,
    upper: float | Tensor,
    temperature: float,
    tolerance: float,
    probabilities: Array,
    side: Array,
    held: Array,
) -> tuple[Array, Array]:
    """Fill what `forward_plain` answers and what its gradient needs; return the logits and 1/T as arrays."""
    rows = _array(logits)
    if isinstance(lower, Tensor) and isinstance(upper, Tensor):
        low, high = _array(lower), _array(upper)
    else:
        low, high = np.array([lower], rows.dtype), np.array([upper], rows.dtype)
    inverse = np.array([1.0 / temperature])
    refused = forward_rows(rows, low, high, inverse, tolerance, probabilities, side, held)
    if refused >= 0:
        low_rows, high_rows = (torch.from_numpy(np.atleast_2d(bound)) for bound in (low, high))
        raise_for_row(logits, low_rows, high_rows, tolerance, refused)
    return rows, inverse


def backward(  # noqa: PLR0917 - the order of the operator's own arguments
    upstream: Tensor,
    probabilities: Tensor,
    side: Tensor,
    logits: Tensor,
    lower: Tensor,
    upper: Tensor,
    temperature: Tensor,
    wanted: GradientMask,
) -> Gradients:
    """Gradients in logits, lower, upper and temperature; an empty tensor where none is wanted."""
    by_logits = torch.empty_like(probabilities)
    out = by_logits.numpy()
    by_lower, by_upper = [
        np.empty((len(out), bound.shape[1]), out.dtype) if wants else UNWANTED[out.dtype]
        for bound, wants in ((lower, wanted.lower), (upper, wanted.upper))
    ]
    by_temperature = np.empty(len(out)) if wanted.temperature else NO_TEMPERATURE
    backward_rows(
        _array(upstream),
        _array(probabilities),
        side.numpy(),
        MAYBE_HELD,
        _array(logits),
        _inverse(temperature),
        out,
        by_lower,
        by_upper,
        by_temperature,
    )
    return Gradients(
        by_logits,
        torch.from_numpy(by_lower).sum_to_size(lower.shape) if wanted.lower else logits.new_empty(0),
        torch.from_numpy(by_upper).sum_to_size(upper.shape) if wanted.upper else logits.new_empty(0),
        torch.from_numpy(by_temperature)[:, None].sum_to_size(temperature.shape).to(temperature.dtype)
        if wanted.temperature
        else logits.new_empty(0),
    )


def backward_plain(  # noqa: PLR0917 - the order of the operator's own arguments
    upstream: Tensor,
    probabilities: Array,
    side: Array,
    held: Array,
    logits: Array,
    inverse: Array,
    lower: float | Tensor,
    upper: float | Tensor,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `forward_plain` in the logits and, where wanted, in bounds that are tensors."""
    by_logits = torch.empty(logits.shape, dtype=upstream.dtype)
    out = by_logits.numpy()
    unwanted = UNWANTED[out.dtype]
    by_lower = np.empty_like(out) if wanted[0] else unwanted
    by_upper = np.empty_like(out) if wanted[1] else unwanted
    backward_rows(
        upstream.contiguous().numpy(),
        probabilities,
        side,
        held,
        logits,
        inverse,
        out,
        by_lower,
        by_upper,
        NO_TEMPERATURE,
    )
    if not (wanted[0] or wanted[1]):
        return by_logits, None, None
    return (
        by_logits,
        torch.from_numpy(by_lower).sum_to_size(lower.shape)
        if isinstance(lower, Tensor) and wanted[0]
        else None,
        torch.from_numpy(by_upper).sum_to_size(upper.shape)
        if isinstance(upper, Tensor) and wanted[1]
        else None,
    )


def _array(values: Tensor) -> Array:
    """Lend a tensor's memory to numpy, copying only what is not laid out row by row."""
    return values.detach().contiguous().numpy()


def _inverse(temperature: Tensor) -> Array:
    """One over each row's temperature, in float64."""
    values = temperature.detach().numpy().astype(np.float64).reshape(-1)
    if not (values.min() > 0.0 and values.max() < np.inf):
        row = int(np.argmin((values > 0.0) & (values < np.inf)))
        raise ValueError(f"temperature {values[row]:.9g} of row {row} is not a positive number")
    return 1.0 / values
