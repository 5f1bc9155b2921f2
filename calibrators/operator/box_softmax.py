"""The box-constrained softmax: the last step of every calibrator, from logits and bounds to probabilities."""

from typing import Any

import torch
from torch import Tensor

from calibrators.operator.bounds import sum_tolerance
from calibrators.operator.torch_solver import AT_LOWER, AT_UPPER, FREE, solve

HALF = (torch.float16, torch.bfloat16)


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

    whose solution is p_i = clip(exp(g_i / temperature) / Z, lower_i, upper_i) with the Z that makes the sum 1.

    Parameters
    ----------
    logits : Tensor
        Floating point; -inf stands for a class that cannot occur. Half precisions are computed in wider types.
    lower, upper : number or Tensor, optional
        Whatever broadcasts to the logits; by default 0 and 1. Tensors promote the result's dtype as in any
        torch operation; numbers are rounded to it.
    temperature : number or Tensor
        Positive. A tensor broadcasts to the logits with size 1 along `dim`.
    dim : int
        The axis of the classes.

    Returns
    -------
    Tensor of the logits' shape
        `lower <= p <= upper` holds to the last bit in the result's dtype.

    Raises
    ------
    ValueError
        Naming the row, the class or the sum: a logit that is NaN or +inf, a row of nothing but -inf, a bound
        that is no probability, a lower bound above its upper bound, bounds whose sums leave no room for 1.

    Notes
    -----
    Differentiable once, in logits, lower, upper and temperature. Where the solution has a kink the gradient is
    the one-sided one for loosened bounds: a class with lower == upper is held by the side that its free value
    lies beyond; where no class is free the gradient of each bound is that of its class alone.
    """
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating point, got {logits.dtype}")
    if logits.ndim == 0:
        raise ValueError("logits need at least one dimension")
    low = _as_tensor(0.0 if lower is None else lower, logits)
    high = _as_tensor(1.0 if upper is None else upper, logits)
    divisor = _as_tensor(temperature, logits)
    dtype = logits.dtype
    for value in (low, high, divisor):
        if value.ndim:
            dtype = torch.promote_types(dtype, value.dtype)
    shape = logits.shape
    rows = logits.movedim(dim, -1)
    low, high, divisor = (_as_rows(value, shape, dim, dtype) for value in (low, high, divisor))
    num_classes = rows.shape[-1]
    _check(rows.reshape(-1, num_classes), low, high, divisor)
    flat: Tensor = _BoxSoftmax.apply(rows.reshape(-1, num_classes).to(dtype), low, high, divisor)
    return flat.reshape(rows.shape).movedim(-1, dim)


def _as_tensor(value: float | Tensor, logits: Tensor) -> Tensor:
    """Pass a tensor as it is; make a number float64, so that its last bits live until the result's rounding."""
    return (
        value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device=logits.device)
    )


def _as_rows(value: Tensor, shape: torch.Size, dim: int, dtype: torch.dtype) -> Tensor:
    """Bring what broadcasts to the logits to two dimensions, (N or 1, K or 1), classes last."""
    if value.ndim == 0:
        return value.to(dtype).reshape(1, 1)
    try:
        full = value.to(dtype).expand(shape)
    except RuntimeError:
        raise ValueError(
            f"shape {tuple(value.shape)} does not broadcast to logits of shape {tuple(shape)}"
        ) from None
    return full.movedim(dim, -1).reshape(-1, shape[dim])


def _check(logits: Tensor, lower: Tensor, upper: Tensor, temperature: Tensor) -> None:
    """Raise a ValueError that names the first thing wrong with the values."""
    num_classes = logits.shape[-1]
    if not (temperature > 0).all() or not temperature.isfinite().all():
        raise ValueError("temperature must be positive and finite")
    wrong = logits.isnan() | logits.isposinf()
    if wrong.any():
        row, index = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(f"logit {logits[row, index].item()} of class {index} in row {row}")
    empty = logits.isneginf().all(-1)
    if logits.numel() and empty.any():
        raise ValueError(f"every logit of row {int(empty.nonzero()[0])} is -inf")
    for name, bound in (("lower", lower), ("upper", upper)):
        wrong = ~((bound >= 0) & (bound <= 1))
        if wrong.any():
            row, index = (int(i) for i in wrong.nonzero()[0])
            raise ValueError(
                f"{name} bound {bound[row, index].item()} of class {index} in row {row} is not in [0, 1]"
            )
    wrong = lower > upper
    if wrong.any():
        row, index = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(f"lower bound above upper bound for class {index} in row {row}")
    tolerance = sum_tolerance(num_classes, lower.dtype)
    for name, bound, sign in (("lower", lower, 1.0), ("upper", upper, -1.0)):
        total = bound.to(torch.float64).expand(-1, num_classes).sum(-1)
        wrong = (total - 1.0) * sign > tolerance
        if logits.numel() and wrong.any():
            row = int(wrong.nonzero()[0])
            relation = "above" if sign > 0 else "below"
            raise ValueError(
                f"the {name} bounds of row {row} add up to {total[row].item():.17g}, {relation} 1"
            )


class _BoxSoftmax(torch.autograd.Function):
    """The operator on rows, with the Jacobian products of the paper's appendix "Jacobians"."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, lower: Tensor, upper: Tensor, temperature: Tensor) -> Tensor:
        exact, side = solve(logits, lower, upper, temperature)
        probabilities = exact.to(logits.dtype)
        ctx.save_for_backward(logits, lower, upper, temperature, exact, side)
        return probabilities

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        logits, lower, upper, temperature, exact, side = ctx.saved_tensors
        upstream = upstream.to(torch.float64)
        free = torch.where(side == FREE, exact, 0.0)
        mass = free.sum(-1, keepdim=True)
        mean = torch.where(mass > 0, (free * upstream).sum(-1, keepdim=True) / mass, 0.0)
        centred = upstream - mean
        by_score = free * centred
        by_logits = by_score / temperature
        scores = torch.where(by_score == 0, 0.0, logits - logits.amax(-1, keepdim=True)) / temperature
        by_temperature = -(by_score * scores).sum(-1, keepdim=True) / temperature
        by_lower = torch.where(side == AT_LOWER, centred, 0.0)
        by_upper = torch.where(side == AT_UPPER, centred, 0.0)
        return (
            by_logits.to(logits.dtype),
            _reduce_to(by_lower, lower),
            _reduce_to(by_upper, upper),
            _reduce_to(by_temperature, temperature),
        )


def _reduce_to(gradient: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient over the axes along which its argument was broadcast."""
    return gradient.sum_to_size(like.shape).to(like.dtype)
