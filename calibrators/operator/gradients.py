"""What the engines' backward passes are asked for and answer, and the reference form of it in plain torch."""

from typing import NamedTuple

import torch
from torch import Tensor

from boxcal.calibrators.operator.torch_solver import AT_LOWER, AT_UPPER, FREE


class GradientMask(NamedTuple):
    """Which gradients somebody needs; the logits' one is always computed."""

    lower: bool
    upper: bool
    temperature: bool


class Gradients(NamedTuple):
    """Gradients in the operator's arguments, each of its argument's shape, or empty where not wanted."""

    logits: Tensor
    lower: Tensor
    upper: Tensor
    temperature: Tensor


def jacobian_products(  # noqa: PLR0917 - the order of the operator's own arguments
    upstream: Tensor,
    probabilities: Tensor,
    side: Tensor,
    logits: Tensor,
    lower: Tensor,
    upper: Tensor,
    temperature: Tensor,
    wanted: GradientMask,
) -> Gradients:
    """Multiply the upstream gradient by the Jacobians of the paper's appendix, in O(K) per row.

    With q the probabilities of the free classes, s their sum and m = q·u / s the mean of the upstream u over
    them, the product with the Jacobian in the scores g / τ is q (u - m), and in a bound it is u - m for the
    classes that the bound holds. Where s is 0 the free classes share it in the ratio of exp(g / τ).
    """
    work = torch.float64
    inverse = 1.0 / temperature.to(work)
    free = side == FREE
    scores = logits.to(work)
    top = torch.where(free, scores, -torch.inf).amax(-1, keepdim=True)
    relative = torch.where(free & (scores == top), 0.0, (scores - top) * inverse).exp()
    weights = torch.where(free, probabilities.to(work), 0.0)
    mass = weights.sum(-1, keepdim=True)
    weights = torch.where(mass > 0, weights, torch.where(free, relative, 0.0))
    total = weights.sum(-1, keepdim=True)
    centred = upstream.to(work) - (weights * upstream).sum(-1, keepdim=True) / total
    centred = torch.where(total > 0, centred, 0.0)
    by_logits = torch.where(free, probabilities * centred * inverse, 0.0)

    empty = logits.new_empty(0)
    by_lower = by_upper = by_temperature = empty
    if wanted.lower:
        by_lower = torch.where(side == AT_LOWER, centred, 0.0).sum_to_size(lower.shape).to(lower.dtype)
    if wanted.upper:
        by_upper = torch.where(side == AT_UPPER, centred, 0.0).sum_to_size(upper.shape).to(upper.dtype)
    if wanted.temperature:
        moving = by_logits != 0
        nearest = torch.where(moving, scores, -torch.inf).amax(-1, keepdim=True)
        below = torch.where(moving, scores - nearest, 0.0)
        products = -(by_logits * below).sum(-1, keepdim=True) * inverse
        by_temperature = products.sum_to_size(temperature.shape).to(temperature.dtype)
    return Gradients(by_logits.to(logits.dtype), by_lower, by_upper, by_temperature)
