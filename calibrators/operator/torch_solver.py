"""The reference solver, in plain torch: what the compiled engines are tested against, and what is traced.

It contains no control flow that depends on values, so `torch.jit.trace` and ONNX can record it.
"""

import torch
from torch import Tensor

from boxcal.calibrators.operator.constants import AT_LOWER, AT_UPPER, FREE, UNDERFLOW


def solve(logits: Tensor, lower: Tensor, upper: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Box-constrained softmax of each row, and which bound holds each class.

    The optimum is p_i = clip(λ w_i, a_i, b_i) with w_i = exp(g_i / τ) and the one λ = 1/Z for which the sum
    is 1. The sum is non-decreasing in λ and piecewise linear in it; it bends where a class meets a bound, at
    λ = a_i / w_i and b_i / w_i. These 2K points are sorted and bisected for the piece that holds the root, on
    which λ = (1 - sum of the bounds that hold classes) / (sum of the other classes' w_i).

    λ is stored as a pair (anchor, scale), which means scale · exp(-anchor / τ), where the anchor is a class's
    logit: nothing underflows, and finite logits of any size keep the digits of their differences. Logits are
    halved so that no difference overflows.

    `logits`: tensor of shape (N, K). `lower`, `upper`: tensor that broadcast to (N, K), feasible bounds, up
    to rounding. `temperature`: tensor that broadcasts to (N, 1). Returns `probabilities`, float64 Tensor of
    shape (N, K): a row whose logits hold NaN or +inf, or nothing but -inf, is NaN; `side`, int8 Tensor of
    shape (N, K): `FREE`, `AT_LOWER` or `AT_UPPER`.
    """
    lower, upper = (bound.to(torch.float64).expand_as(logits) for bound in (lower, upper))
    rate = (2.0 / temperature.to(torch.float64)).clamp(max=torch.finfo(torch.float64).max)
    halves = 0.5 * logits.to(torch.float64)
    top = halves.amax(-1, keepdim=True)
    refused = ~(halves - top <= 0).all(-1, keepdim=True)
    lowest = torch.where(halves.isfinite(), halves, torch.inf).amin(-1, keepdim=True)
    below = torch.minimum(lowest - UNDERFLOW / rate, lowest - lowest.abs() * 2.3e-16)
    halves = torch.where(halves == -torch.inf, below, halves)

    anchors, scales = torch.cat([halves, halves], -1), torch.cat([lower, upper], -1)
    order = _ascending(anchors, scales, top, rate)
    first, last = torch.zeros_like(order[:, :1]), torch.full_like(order[:, :1], scales.shape[-1])
    for _ in range(int(scales.shape[-1]).bit_length()):
        middle = (first + last) // 2
        point = order.gather(-1, middle.clamp(max=scales.shape[-1] - 1))
        values = _values(halves, rate, anchors.gather(-1, point), scales.gather(-1, point))
        is_low = (values.clamp(lower, upper).sum(-1, keepdim=True) <= 1.0) & (middle < last)
        first, last = torch.where(is_low, middle + 1, first), torch.where(is_low, last, middle)
    ends = [order.gather(-1, place.clamp(0, scales.shape[-1] - 1)) for place in (first - 1, first)]
    (anchor, next_anchor), (scale, next_scale) = (
        [of.gather(-1, end) for end in ends] for of in (anchors, scales)
    )
    at_left = _values(halves, rate, anchor, scale)
    is_root = at_left.clamp(lower, upper).sum(-1, keepdim=True) == 1.0
    # Points closer than rounding may be out of order, so the sides are taken in the middle of the piece.
    values = _values(halves, rate, 0.5 * (anchor + next_anchor), scale.sqrt() * next_scale.sqrt())
    under, over = values < lower, values >= upper
    free = ~(under | over)
    mass = 1.0 - torch.where(under, lower, torch.where(over, upper, 0.0)).sum(-1, keepdim=True)
    top = torch.where(free, halves, -torch.inf).amax(-1, keepdim=True)
    weight = torch.where(free, ((halves - top) * rate).exp(), 0.0).sum(-1, keepdim=True)
    values = torch.where(is_root, at_left, _values(halves, rate, top, mass / weight))
    is_moved = is_root | (mass > 0) & (weight > 0)  # else no free class has any mass, and the sides stay
    under = (is_moved & ((values < lower) | ((lower == upper) & (values <= upper)))) | (~is_moved & under)
    over = ((is_moved & (values > upper)) | (~is_moved & over)) & ~under

    full_lower, full_upper = lower.sum(-1, keepdim=True) >= 1.0, upper.sum(-1, keepdim=True) <= 1.0
    under, over = (under & ~full_upper) | full_lower, (over | full_upper) & ~full_lower
    values = torch.where(under, lower, torch.where(over, upper, values.clamp(lower, upper)))
    side = torch.where(under, AT_LOWER, torch.where(over, AT_UPPER, FREE))
    side = _free_one(halves, lower, upper, rate, side).to(torch.int8)
    return torch.where(refused, torch.nan, values), side


def _values(halves: Tensor, rate: Tensor, anchor: Tensor, scale: Tensor) -> Tensor:
    """λ w_i of every class, for the λ of a pair."""
    values = ((halves - anchor) * rate).exp() * scale
    return torch.where(scale > 0, values, 0.0)


def _ascending(anchors: Tensor, scales: Tensor, top: Tensor, rate: Tensor) -> Tensor:
    """Order in which the λ of pairs ascend, by the sum (top - anchor) + log(scale) / rate.

    It is sorted as an unevaluated sum of three numbers, as a rounded sum would tie classes far below top.
    """
    far, near = _two_sum(top, -anchors)
    high, lost = _two_sum(far, scales.log() / rate)
    middle, low = _two_sum(near, torch.where(scales > 0, lost, 0.0))
    high, middle = _two_sum(high, middle)
    order = _argsort(low)
    order = order.gather(-1, _argsort(torch.where(scales > 0, middle, 0.0).gather(-1, order)))
    return order.gather(-1, _argsort(high.gather(-1, order)))


def _argsort(values: Tensor) -> Tensor:
    """Sort each row stably; every sort of ONNX is stable, and its exporter does not know the argument."""
    if torch.onnx.is_in_onnx_export():
        return values.sort(-1).indices
    return values.sort(stable=True, dim=-1).indices


def _two_sum(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Add two numbers: their rounded sum, and what rounding lost (Knuth)."""
    total = left + right
    shadow = total - left
    return total, (left - (total - shadow)) + (right - shadow)


def _free_one(halves: Tensor, lower: Tensor, upper: Tensor, rate: Tensor, side: Tensor) -> Tensor:
    """Free the class that looser bounds would move first where none is (all those at a lower bound of 0)."""
    stuck = ~(side == FREE).any(-1, keepdim=True)
    rising = (side == AT_LOWER) & (lower < upper)
    falling = (side == AT_UPPER) & (lower < upper)
    # Measured from the nearest of them, which is the first to move unless another is close by.
    near_top = torch.where(rising, halves, -torch.inf).amax(-1, keepdim=True)
    near_bottom = torch.where(falling, halves, torch.inf).amin(-1, keepdim=True)
    first_to_rise = torch.where(rising, lower.log() - (halves - near_top) * rate, torch.inf)
    first_to_fall = torch.where(falling, (halves - near_bottom) * rate - upper.log(), torch.inf)
    distance = torch.where(rising.any(-1, keepdim=True), first_to_rise, first_to_fall)
    nearest = distance.amin(-1, keepdim=True)
    first = (distance == nearest).cumsum(-1) == 1
    chosen = (distance == nearest) & (first | (nearest == -torch.inf))
    return torch.where(stuck & chosen & (distance < torch.inf), FREE, side)
