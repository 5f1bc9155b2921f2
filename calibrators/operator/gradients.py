"""The operator's gradient in plain torch, for rows on a GPU: nothing waits for the device."""

from typing import NamedTuple

import torch
from torch import Tensor

from boxcal.calibrators.operator.constants import AT_LOWER, AT_UPPER, FREE

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
"""Gradients in logits, lower, upper, temperature, each of its argument's shape; empty where not asked for."""


class GradientMask(NamedTuple):
    """Which gradients are needed; that of the logits always is."""

    lower: bool
    upper: bool
    temperature: bool = False


def jacobian_products(  # noqa: PLR0917 - the order of the operator's own arguments
    upstream: Tensor,
    probabilities: Tensor,
    side: Tensor,
    logits: Tensor,
    lower: Tensor,
    upper: Tensor,
    temperature: Tensor,
    mask: GradientMask,
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

    found = [by_logits.to(logits.dtype)]
    for wanted, which, bound in ((mask.lower, AT_LOWER, lower), (mask.upper, AT_UPPER, upper)):
        held = torch.where(side == which, centred, 0.0) if wanted else None
        found.append(logits.new_empty(0) if held is None else held.sum_to_size(bound.shape).to(bound.dtype))
    if not mask.temperature:
        return found[0], found[1], found[2], logits.new_empty(0)
    moving = by_logits != 0
    nearest = torch.where(moving, scores, -torch.inf).amax(-1, keepdim=True)
    products = -(by_logits * torch.where(moving, scores - nearest, 0.0)).sum(-1, keepdim=True) * inverse
    return found[0], found[1], found[2], products.sum_to_size(temperature.shape).to(temperature.dtype)
