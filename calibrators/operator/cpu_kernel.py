"""The CPU engine: tensors of rows handed to the fused loops as arrays that share their memory.

Importing it costs numba's import; the loops are compiled once per machine and kept on disk (see `warm`).
"""

import numpy as np
import torch
from torch import Tensor

from calibrators.operator.checks import raise_for_row
from calibrators.operator.cpu_backward import backward_rows
from calibrators.operator.cpu_loops import forward_rows
from calibrators.operator.exact_row import Array
from calibrators.operator.gradients import Gradients, Wanted


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
        _array(logits), low, high, _inverse(temperature), tolerance, probabilities.numpy(), side.numpy()
    )
    if refused >= 0:
        raise_for_row(logits, lower, upper, tolerance, refused)
    return probabilities, side


def forward_plain(
    logits: Tensor, lower: float | Tensor, upper: float | Tensor, temperature: float, tolerance: float
) -> Tensor:
    """Solve rows that nobody differentiates or traces, with as little around the loops as can be.

    Bounds are two numbers, or two tensors of shape (N or 1, K), of the logits' dtype.
    """
    rows = _array(logits)
    if isinstance(lower, Tensor) and isinstance(upper, Tensor):
        low, high = _array(lower), _array(upper)
    else:
        low, high = np.array([lower], rows.dtype), np.array([upper], rows.dtype)
    probabilities = torch.empty_like(logits)
    side = np.empty(rows.shape, np.int8)
    inverse = np.array([1.0 / temperature])
    refused = forward_rows(rows, low, high, inverse, tolerance, probabilities.numpy(), side)
    if refused >= 0:
        low_rows, high_rows = (torch.from_numpy(np.atleast_2d(bound)) for bound in (low, high))
        raise_for_row(logits, low_rows, high_rows, tolerance, refused)
    return probabilities


def backward(  # noqa: PLR0917 - the order of the operator's own arguments
    upstream: Tensor,
    probabilities: Tensor,
    side: Tensor,
    logits: Tensor,
    lower: Tensor,
    upper: Tensor,
    temperature: Tensor,
    wanted: Wanted,
) -> Gradients:
    """Gradients in logits, lower, upper and temperature; an empty tensor where none is wanted."""
    rows = len(logits)
    by_logits = torch.empty_like(probabilities)
    by_lower = logits.new_empty(rows, lower.shape[1] if wanted.lower else 0)
    by_upper = logits.new_empty(rows, upper.shape[1] if wanted.upper else 0)
    by_temperature = torch.empty(rows if wanted.temperature else 0, dtype=torch.float64)
    backward_rows(
        _array(upstream),
        _array(probabilities),
        side.numpy(),
        _array(logits),
        _inverse(temperature),
        by_logits.numpy(),
        by_lower.numpy(),
        by_upper.numpy(),
        by_temperature.numpy(),
    )
    return Gradients(
        by_logits,
        by_lower.sum_to_size(lower.shape) if wanted.lower else by_lower,
        by_upper.sum_to_size(upper.shape) if wanted.upper else by_upper,
        by_temperature[:, None].sum_to_size(temperature.shape).to(temperature.dtype)
        if wanted.temperature
        else by_temperature.to(temperature.dtype),
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
