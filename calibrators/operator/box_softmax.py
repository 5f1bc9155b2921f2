"""The box-constrained softmax: the last step of every calibrator, from logits and bounds to probabilities."""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from boxcal.calibrators.operator import constants
from boxcal.calibrators.operator.bounds import is_plain, is_traced, sum_tolerance
from boxcal.calibrators.operator.op import refuse_forward_mode, solve_rows
from boxcal.calibrators.operator.torch_solver import solve

HALF = (torch.float16, torch.bfloat16)
NUMBERS = float, int
ROUNDING = {dtype: torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)}


def box_constrained_softmax(
    logits: Tensor,
    lower: float | Tensor | None = None,
    upper: float | Tensor | None = None,
    *,
    temperature: float | Tensor = 1.0,
    dim: int = -1,
) -> Tensor:
    """Probabilities of the largest expected logit plus entropy among those that obey their bounds.

    Solves, for every slice g along `dim` (equation 3 of the paper, BCSoftmax),

        argmax over p with sum(p) = 1 and lower <= p <= upper  of  g·p + temperature · H(p),

    whose solution is p_i = clip(exp(g_i / temperature) / Z, lower_i, upper_i), with Z such that the sum is 1.

    Parameters
    ----------
    logits : Tensor
        Floating point; -inf stands for a class that cannot occur. float16 and bfloat16 are computed in
        float32, float32 with sums in float64.
    lower, upper : number or Tensor, optional
        Whatever broadcasts to the logits; 0 and 1 if absent (the paper's UBSoftmax, LBSoftmax). Tensors
        promote the result's dtype as in any torch operation; numbers are rounded to it.
    temperature : number or Tensor
        Positive. A tensor broadcasts to the logits with size 1 along `dim`.
    dim : int
        The axis of the classes.

    Returns
    -------
    Tensor of the logits' shape
        `lower <= p <= upper` holds to the last bit in the result's dtype. Under autocast, logits of half
        precision give float32.

    Raises
    ------
    ValueError
        Naming the row, the class or the sum: a logit that is NaN or +inf, a row of nothing but -inf, a bound
        that is no probability, a lower bound above its upper bound, bounds whose sums leave no room for 1 (by
        more than rounding), shapes that do not match. On a GPU, where reading values would wait for the
        device, a row with such values comes out as NaN instead.
    NotImplementedError
        When it is differentiated twice, or in forward mode.

    Notes
    -----
    The gradient in logits, lower, upper and temperature is that of the paper's "Jacobians".
    At kinks the one-sided derivative for loosened bounds is taken:

    - a class with lower == upper follows the bound that its unconstrained value lies beyond, so that only
      this bound has a gradient;
    - where the bounds alone add up to 1 (no free mass), the class that loosened bounds would move first
      counts as free, so that the gradient of another class's bound is its upstream gradient less that
      class's; where no class can move at all, every gradient is 0.

    If upper bounds force mass onto classes of logit -inf, these share it as classes of one very low logit.
    """
    plain = _plain_bounds(logits, lower, upper, temperature, dim)
    if plain is not None:
        low, high = plain[:2]  # as two tensors, or as two numbers
        differentiable = torch.is_grad_enabled() and (
            logits.requires_grad or (type(low) not in NUMBERS and (low.requires_grad or high.requires_grad))
        )
        kernel = _cpu_kernel()
        solve_plain = kernel.DifferentiableRows.apply if differentiable else kernel.forward_plain
        answer: Tensor = solve_plain(logits, *plain)
        return answer
    refuse_forward_mode(logits, lower, upper, temperature)
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a torch.Tensor, not {type(logits).__name__}; use torch.as_tensor")
    shape, device = logits.shape, logits.device
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating point, got {logits.dtype}")
    if not shape or not shape[dim]:
        raise ValueError(f"logits of shape {tuple(shape)} have no classes along dimension {dim}")
    dtype = logits.dtype
    for value in (lower, upper, temperature):
        if isinstance(value, Tensor) and value.ndim:
            dtype = torch.promote_types(dtype, value.dtype)
    if dtype in HALF and torch.is_autocast_enabled(device.type):
        dtype = torch.float32
    work = torch.float32 if dtype in HALF else dtype

    if not isinstance(temperature, Tensor) and not 0.0 < temperature < math.inf:
        raise ValueError(f"temperature {temperature} is not a positive number")
    divisor = _as_rows("temperature", temperature, logits, dim, dtype).to(work)
    if divisor.shape[1] != 1:
        raise ValueError(f"temperature has {divisor.shape[1]} values along dimension {dim}; it takes one")
    low = _as_rows("lower", 0.0 if lower is None else lower, logits, dim, dtype).to(work)
    high = _as_rows("upper", 1.0 if upper is None else upper, logits, dim, dtype).to(work)
    flat = logits.movedim(dim, -1)
    rows = flat.reshape(-1, shape[dim]).to(work)
    if is_traced():  # which would record nothing of a registered op
        probabilities = solve(rows, low, high, divisor)[0]
    else:
        slack = sum_tolerance(shape[dim], *(_rounding(value, dtype) for value in (lower, upper)))
        probabilities = solve_rows(rows, low, high, divisor, slack)[0]
    return probabilities.to(dtype).reshape(flat.shape).movedim(-1, dim)


@cache
def _cpu_kernel() -> Any:
    from boxcal.calibrators.operator import cpu_kernel  # noqa: PLC0415 - numba loads when first needed

    return cpu_kernel


def _plain_bounds(
    logits: Tensor,
    lower: float | Tensor | None,
    upper: float | Tensor | None,
    temperature: float | Tensor,
    dim: int,
) -> tuple[Any, Any, Any, float] | None:
    """Bounds, temperature and tolerance for the CPU engine's shortcut, or None where it does not apply.

    It is for rows on the CPU that need no reshaping and no dispatcher.
    """
    if not is_plain(logits):
        return None
    shape, dtype = logits.shape, logits.dtype
    if (
        len(shape) != 2
        or 0 in shape
        or dim not in (-1, 1)
        or dtype not in ROUNDING
        or not logits.is_cpu
        or type(temperature) not in NUMBERS
        or not 0.0 < temperature < math.inf
    ):
        return None
    classes, low, high = shape[1], 0.0 if lower is None else lower, 1.0 if upper is None else upper
    if type(low) not in NUMBERS or type(high) not in NUMBERS:
        rows = []
        for value in (low, high):
            if isinstance(value, float | int):
                rows.append(torch.full((1, classes), value, dtype=dtype))
            elif (
                isinstance(value, Tensor)
                and value.dtype is dtype
                and value.shape in (shape, (1, classes), (classes,))
            ):
                rows.append(value if value.ndim == 2 else value[None])
            else:
                return None
        low, high = rows
    return low, high, temperature, constants.sum_tolerance(classes, ROUNDING[dtype])


def _rounding(value: float | Tensor | None, dtype: torch.dtype) -> torch.dtype:
    """Name the dtype whose rounding a bound has been through."""
    return value.dtype if isinstance(value, Tensor) and value.is_floating_point() else dtype


def _as_rows(name: str, value: float | Tensor, logits: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    """Bring what broadcasts to the logits to the shape (N or 1, K or 1), the classes last."""
    if not isinstance(value, Tensor):
        if hasattr(value, "__len__"):
            raise TypeError(f"{name} is a {type(value).__name__}; it takes a number or a tensor")
        return torch.full((1, 1), value, dtype=dtype, device=logits.device)
    if not value.ndim:
        return value.to(dtype).reshape(1, 1)
    shape = logits.shape
    padded = (1,) * (len(shape) - value.ndim) + tuple(value.shape)
    if len(padded) != len(shape) or any(
        own not in (1, whole) for own, whole in zip(padded, shape, strict=True)
    ):
        raise ValueError(
            f"{name} of shape {tuple(value.shape)} does not broadcast to logits of shape {tuple(shape)}"
        )
    rows = value.to(dtype).reshape(padded).movedim(dim, -1)
    if math.prod(rows.shape[:-1]) > 1:
        rows = rows.expand(*logits.movedim(dim, -1).shape[:-1], rows.shape[-1])
    return rows.reshape(-1, rows.shape[-1])
