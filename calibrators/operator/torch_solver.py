"""The exact solver in plain torch: the operator's reference engine, for any device and any dtype.

It stands below `box_softmax`, which checks the arguments and brings them to two dimensions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

AT_LOWER = 1
AT_UPPER = 2
FREE = 0

MAX_PASSES = 400
"""Far above what picking breakpoints at random needs (about 30); reaching it would be a defect."""

LAST_STEPS = 4
"""Newton steps that only rounding can call for, once no class meets a bound inside the bracket."""

STRIDE = 7919
"""A prime, by which the choice of breakpoints varies."""

VERTEX = 1e-15
"""With no free class, the bounds alone add up to 1; so close, they do."""

UNDERFLOW = 800.0
"""exp(-800) is zero in float64: how far below every finite logit a logit of -inf is placed."""


def solve(logits: Tensor, lower: Tensor, upper: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    """Box-constrained softmax of each row, and on which side of its box every class ended.

    The optimum is p_i = clip(λ w_i, a_i, b_i) with w_i = exp(g_i / τ) and the one λ = 1/Z for which the sum
    is 1. The sum is piecewise linear and non-decreasing in λ, so that a Newton step from a point with the
    right sets of clipped classes is the exact answer. Where a step leaves the bracket, the next point is one
    at which some class inside the bracket meets a bound; such picks alone would end the search, too.

    λ is kept as a pair (anchor, scale) that stands for scale · exp(-anchor / τ), where the anchor is the
    logit of a class that matters: nothing underflows, and finite logits of any size keep their digits.

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
    lower = lower.to(torch.float64).expand_as(logits)
    upper = upper.to(torch.float64).expand_as(logits)
    rate = (2.0 / temperature.to(torch.float64)).clamp(max=torch.finfo(torch.float64).max)
    rate = rate.expand(len(logits), 1)
    halves = 0.5 * logits.to(torch.float64)
    top = halves.amax(-1, keepdim=True)
    refused = ~(halves - top <= 0).all(-1)
    halves = _lift_minus_infinity(halves, rate)

    weights = ((halves - top) * rate).exp()
    probabilities = weights / weights.sum(-1, keepdim=True)
    side = torch.zeros_like(probabilities, dtype=torch.int8)
    outside = ((probabilities < lower) | (probabilities > upper)).any(-1) & ~refused
    rows = outside.nonzero().squeeze(-1)
    if rows.numel():
        probabilities[rows], side[rows] = _solve_clipped(halves[rows], lower[rows], upper[rows], rate[rows])
    probabilities[refused] = torch.nan
    return probabilities, side


def _lift_minus_infinity(halves: Tensor, rate: Tensor) -> Tensor:
    """Place -inf so far below the finite logits that it weighs nothing beside them, yet ties with itself."""
    lowest = torch.where(halves.isfinite(), halves, torch.inf).amin(-1, keepdim=True)
    below = torch.minimum(lowest - UNDERFLOW / rate, lowest.nextafter(lowest.new_tensor(-torch.inf)))
    return torch.where(halves.isneginf(), below, halves)


class _Pair(NamedTuple):
    """Anchors and scales (M, 1), of one λ per row: scale · exp(-anchor · rate). A scale of 0 is no pair."""

    anchor: Tensor
    scale: Tensor

    def where(self, condition: Tensor, other: "_Pair") -> "_Pair":
        """Take these where the condition holds, the other ones elsewhere."""
        return _Pair(*(torch.where(condition, own, its) for own, its in zip(self, other, strict=True)))

    def of(self, rows: Tensor) -> "_Pair":
        """Take those of some rows."""
        return _Pair(self.anchor[rows], self.scale[rows])

    def is_above(self, other: "_Pair", rate: Tensor) -> Tensor:
        """Whether these stand for more."""
        return self.scale.log() - other.scale.log() > (self.anchor - other.anchor) * rate


def _solve_clipped(halves: Tensor, lower: Tensor, upper: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """Solve rows (M, K) whose plain softmax leaves its box; halves of logits are finite."""
    probabilities = torch.empty_like(halves)
    side = torch.empty_like(halves, dtype=torch.int8)
    every = halves, lower, upper, rate
    at_end = _pin_if_full(lower, upper)
    probabilities[:] = torch.where((at_end == AT_LOWER)[:, None], lower, upper)
    side[:] = at_end[:, None]
    rows = (at_end == FREE).nonzero().squeeze(-1)
    halves, lower, upper, rate = halves[rows], lower[rows], upper[rows], rate[rows]
    top = halves.amax(-1, keepdim=True)
    here = _Pair(top, 1.0 / ((halves - top) * rate).exp().sum(-1, keepdim=True))
    floor = ceiling = _Pair(torch.zeros_like(top), torch.zeros_like(top))
    last = torch.full_like(halves, -1, dtype=torch.int8)
    by_newton = torch.zeros_like(top, dtype=torch.bool)
    last_steps = torch.zeros_like(top, dtype=torch.int8)
    for count in range(MAX_PASSES):
        if not len(rows):
            break
        values = ((halves - here.anchor) * rate).exp() * here.scale
        now = _sides(values, lower, upper)
        free = now == FREE
        pinned = torch.where(free, 0.0, torch.where(now == AT_LOWER, lower, upper))
        free_mass = 1.0 - pinned.sum(-1, keepdim=True)
        excess = torch.where(free, values, 0.0).sum(-1, keepdim=True) - free_mass
        ceiling = here.where(excess > 0, ceiling)
        floor = here.where(excess < 0, floor)

        largest = torch.where(free, halves, -torch.inf).amax(-1, keepdim=True)
        weight = torch.where(free, ((halves - largest) * rate).exp(), 0.0).sum(-1, keepdim=True)
        newton = _Pair(largest, free_mass / weight)
        possible = free.any(-1, keepdim=True) & (newton.scale > 0)
        steps = possible & (count % 3 != 2 or count <= 6)
        steps &= (floor.scale == 0) | ~floor.is_above(newton, rate)
        steps &= (ceiling.scale == 0) | ~newton.is_above(ceiling, rate)
        meetings = _Pair(torch.cat([halves, halves], -1), torch.cat([lower, upper], -1))
        met = _meeting(meetings, rate, floor, ceiling, count)
        at_last = ~steps & (met.scale == 0)
        settled = (by_newton & (now == last).all(-1, keepdim=True)) | (excess == 0)
        settled |= ~free.any(-1, keepdim=True) & (excess.abs() <= VERTEX)
        settled |= at_last & (~possible | (last_steps == LAST_STEPS))
        settled = settled.squeeze(-1)
        if settled.any():
            done = rows[settled]
            probabilities[done] = values[settled].clamp(lower[settled], upper[settled])
            side[done] = now[settled]
        last_steps = last_steps + at_last
        by_newton = steps | at_last
        here = newton.where(by_newton, met)
        going = ~settled
        rows, halves, lower, upper, rate = (part[going] for part in (rows, halves, lower, upper, rate))
        here, floor, ceiling = (pair.of(going) for pair in (here, floor, ceiling))
        last, by_newton, last_steps = now[going], by_newton[going], last_steps[going]
    return probabilities, _free_one(*every, side)


def _sides(values: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """On which side of its box every class is."""
    side = torch.where(values < lower, AT_LOWER, torch.where(values > upper, AT_UPPER, FREE))
    return torch.where((side == FREE) & (lower == upper), AT_LOWER, side).to(torch.int8)


def _meeting(points: _Pair, rate: Tensor, floor: _Pair, ceiling: _Pair, count: int) -> _Pair:
    """Per row, one of the points that lie between two others; its scale is 0 if there is none.

    Which class depends on the count of passes: no order of the classes makes every pick a bad one.
    """
    inside = points.scale > 0
    inside &= (floor.scale == 0) | points.is_above(floor, rate)
    inside &= (ceiling.scale == 0) | ceiling.is_above(points, rate)
    rank = inside.cumsum(-1)
    chosen = inside & (rank == STRIDE * count % rank[:, -1:].clamp(min=1) + 1)
    return _Pair(*(torch.where(chosen, part, 0.0).sum(-1, keepdim=True) for part in points))


def _pin_if_full(lower: Tensor, upper: Tensor) -> Tensor:
    """Per row: `AT_LOWER` where the lower bounds take all the mass, `AT_UPPER` where the upper bounds do."""
    full = torch.where(upper.sum(-1) <= 1.0, AT_UPPER, FREE)
    return torch.where(lower.sum(-1) >= 1.0, AT_LOWER, full)


def _free_one(halves: Tensor, lower: Tensor, upper: Tensor, rate: Tensor, side: Tensor) -> Tensor:
    """With no class free, free the one that loosened bounds would move first (all at a lower bound of 0)."""
    stuck = ~(side == FREE).any(-1, keepdim=True)
    rising = (side == AT_LOWER) & (lower < upper)
    falling = (side == AT_UPPER) & (lower < upper)
    # Measured from the nearest of them, which is the first to move unless another is close by.
    near_top = torch.where(rising, halves, -torch.inf).amax(-1, keepdim=True)
    near_bottom = torch.where(falling, halves, torch.inf).amin(-1, keepdim=True)
    first_to_rise = torch.where(rising, lower.log() - (halves - near_top) * rate, torch.inf)
    first_to_fall = torch.where(falling, (halves - near_bottom) * rate - upper.log(), torch.inf)
    distance = torch.where(rising.any(-1, keepdim=True), first_to_rise, first_to_fall)
    chosen = torch.zeros_like(side, dtype=torch.bool).scatter_(-1, distance.argmin(-1, keepdim=True), True)
    chosen = torch.where((distance == -torch.inf).any(-1, keepdim=True), distance == -torch.inf, chosen)
    return torch.where(stuck & chosen & (distance < torch.inf), FREE, side).to(torch.int8)
