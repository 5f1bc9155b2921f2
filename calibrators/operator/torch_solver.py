"""The exact solver in plain torch: the operator's reference engine, for any device and any dtype.

It stands below `box_softmax`, which checks the arguments and brings them to two dimensions.
"""

import torch
from torch import Tensor

AT_LOWER = 1
AT_UPPER = 2
FREE = 0

MAX_PASSES = 400
"""Far above what bisection of the logarithm of the scale needs (about 70); reaching it would be a defect."""

VERTEX = 1e-15
"""With no free class, the bounds alone add up to 1; so close, they do."""

UNDERFLOW = 800.0
"""exp(-800) is zero in float64: how far below every finite logit a logit of -inf is placed."""


def solve(logits: Tensor, lower: Tensor, upper: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Box-constrained softmax of each row, and on which side of its box every class ended.

    The optimum is p_i = clip(λ w_i, a_i, b_i) with w_i = exp(g_i / τ) and the one λ = 1/Z for which the sum
    is 1. The sum is piecewise linear and non-decreasing in λ, so that a Newton step from a point with the
    right sets of clipped classes is the exact answer; a bracket on log λ, halved when Newton dawdles, bounds
    the passes. Between passes w is scaled anew by its largest free class: nothing that matters underflows.

    Parameters
    ----------
    logits : Tensor of shape (N, K)
    lower, upper : Tensor that broadcast to (N, K)
        Feasible bounds, up to rounding.
    temperature : Tensor that broadcasts to (N, 1)

    Returns
    -------
    probabilities : float64 Tensor of shape (N, K)
        A row whose logits hold NaN or +inf, or nothing but -inf, is NaN.
    side : int8 Tensor of shape (N, K)
        `FREE`, `AT_LOWER` or `AT_UPPER`.
    """
    scores = logits.to(torch.float64)
    lower = lower.to(torch.float64).expand_as(scores)
    upper = upper.to(torch.float64).expand_as(scores)
    scores = (scores - scores.amax(-1, keepdim=True)) / temperature.to(torch.float64)
    refused = ~(scores <= 0).all(-1)
    scores = _lift_minus_infinity(scores)

    weights = scores.exp()
    probabilities = weights / weights.sum(-1, keepdim=True)
    side = torch.zeros_like(probabilities, dtype=torch.int8)
    outside = ((probabilities < lower) | (probabilities > upper)).any(-1) & ~refused
    rows = outside.nonzero().squeeze(-1)
    if rows.numel():
        probabilities[rows], side[rows] = _solve_clipped(scores[rows], lower[rows], upper[rows])
    probabilities[refused] = torch.nan
    return probabilities, side


def _lift_minus_infinity(scores: Tensor) -> Tensor:
    """Place -inf so far below the finite scores that it weighs nothing beside them, yet ties with itself."""
    finite = scores.isfinite()
    lowest = torch.where(finite, scores, 0.0).amin(-1, keepdim=True)
    return torch.where(finite, scores, lowest - UNDERFLOW)


def _solve_clipped(scores: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Solve rows (M, K) whose plain softmax leaves its box; scores are at most 0 and finite."""
    probabilities = torch.empty_like(scores)
    side = torch.empty_like(scores, dtype=torch.int8)
    every_score, every_lower, every_upper = scores, lower, upper
    at_end = _pin_if_full(lower, upper)
    probabilities[:] = torch.where((at_end == AT_LOWER)[:, None], lower, upper)
    side[:] = at_end[:, None]

    rows = (at_end == FREE).nonzero().squeeze(-1)
    scores, lower, upper = scores[rows], lower[rows], upper[rows]
    anchor = scores.new_zeros(len(rows), 1)
    scale = 1.0 / scores.exp().sum(-1, keepdim=True)
    low_end = torch.full_like(anchor, -UNDERFLOW)
    high_end = torch.where(upper > 0, upper.log() - scores, -torch.inf).amax(-1, keepdim=True)
    last = torch.full_like(scores, -1, dtype=torch.int8)
    by_newton = torch.zeros_like(anchor, dtype=torch.bool)
    for count in range(MAX_PASSES):
        if not len(rows):
            break
        values = (scores - anchor).exp() * scale
        now = torch.where(values < lower, AT_LOWER, torch.where(values > upper, AT_UPPER, FREE)).to(
            torch.int8
        )
        now = torch.where((now == FREE) & (lower == upper), AT_LOWER, now)
        free = now == FREE
        pinned = torch.where(free, 0.0, torch.where(now == AT_LOWER, lower, upper))
        free_mass = 1.0 - pinned.sum(-1, keepdim=True)
        excess = torch.where(free, values, 0.0).sum(-1, keepdim=True) - free_mass
        log_scale = scale.log() - anchor
        high_end = torch.where(excess > 0, log_scale.minimum(high_end), high_end)
        low_end = torch.where(excess < 0, log_scale.maximum(low_end), low_end)

        next_anchor = torch.where(free, scores, -torch.inf).amax(-1, keepdim=True)
        free_weight = torch.where(free, (scores - next_anchor).exp(), 0.0).sum(-1, keepdim=True)
        next_scale = free_mass / free_weight
        newton = next_scale.log() - next_anchor
        middle = (low_end + high_end) / 2
        bisect = ~((newton >= low_end) & (newton <= high_end)) | (count % 3 == 2 and count > 6)
        settled = by_newton & (now == last).all(-1, keepdim=True)
        settled |= (middle <= low_end) | (middle >= high_end) | (excess == 0)
        settled |= ~free.any(-1, keepdim=True) & (excess.abs() <= VERTEX)
        settled = settled.squeeze(-1)
        if settled.any():
            done = rows[settled]
            probabilities[done] = values[settled].clamp(lower[settled], upper[settled])
            side[done] = now[settled]
        anchor = torch.where(bisect, -middle, next_anchor)
        scale = torch.where(bisect, 1.0, next_scale)
        going = ~settled
        rows, scores, lower, upper = rows[going], scores[going], lower[going], upper[going]
        anchor, scale, low_end, high_end = anchor[going], scale[going], low_end[going], high_end[going]
        last, by_newton = now[going], ~bisect[going]
    return probabilities, _free_one(every_score, every_lower, every_upper, side)


def _pin_if_full(lower: Tensor, upper: Tensor) -> Tensor:
    """Per row: `AT_LOWER` where the lower bounds take all the mass, `AT_UPPER` where the upper bounds do."""
    full = torch.where(upper.sum(-1) <= 1.0, AT_UPPER, FREE)
    return torch.where(lower.sum(-1) >= 1.0, AT_LOWER, full)


def _free_one(scores: Tensor, lower: Tensor, upper: Tensor, side: Tensor) -> Tensor:
    """With no class free, free the one that loosened bounds would move first (all at a lower bound of 0)."""
    stuck = ~(side == FREE).any(-1, keepdim=True)
    rising = (side == AT_LOWER) & (lower < upper)
    falling = (side == AT_UPPER) & (lower < upper)
    first_to_rise = torch.where(rising, lower.log() - scores, torch.inf)
    first_to_fall = torch.where(falling, scores - upper.log(), torch.inf)
    distance = torch.where(rising.any(-1, keepdim=True), first_to_rise, first_to_fall)
    chosen = torch.zeros_like(side, dtype=torch.bool).scatter_(-1, distance.argmin(-1, keepdim=True), True)
    chosen = torch.where((distance == -torch.inf).any(-1, keepdim=True), distance == -torch.inf, chosen)
    return torch.where(stuck & chosen & (distance < torch.inf), FREE, side).to(torch.int8)
