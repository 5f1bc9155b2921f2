"""Slow, obvious solvers of the box-constrained softmax, which the engines are held against.

The first three are the paper's own algorithms; `box_bisection` works in 60 digits and is the judge.
"""

import math
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DIGITS = 60
MINUS_INFINITY_GAP = 800
"""A logit of -inf counts as one so far below the lowest finite one: the operator's convention."""


def upper_bounded_sorted(logits: Floats, upper: Floats) -> Floats:
    """Solve with upper bounds alone by the paper's Algorithm 1: sort by b / exp(g), O(K log K)."""
    weights = np.exp(logits - logits.max())
    order = np.argsort(upper / weights, kind="stable")
    weights, bounds = weights[order], upper[order]
    remaining = np.append(np.cumsum(weights[::-1])[::-1], 0.0)
    mass = np.append(1.0, 1.0 - np.cumsum(bounds))
    cut = next(
        (k for k in range(len(bounds)) if weights[k] * mass[k] <= bounds[k] * remaining[k]), len(bounds)
    )
    answer = bounds.copy()
    if cut < len(bounds):
        answer[cut:] = weights[cut:] * mass[cut] / remaining[cut]
    unsorted = np.empty_like(answer)
    unsorted[order] = answer
    return unsorted


def upper_bounded_quickselect(logits: Floats, upper: Floats, rng: np.random.Generator) -> Floats:
    """Solve with upper bounds alone by the appendix's quickselect, with random pivots: expected O(K)."""
    weights = np.exp(logits - logits.max())
    ratios = upper / weights
    mass, remaining = 1.0, weights.sum()
    threshold = -math.inf
    last = int(ratios.argmax())
    candidates = np.array([k for k in range(len(logits)) if k != last], dtype=np.int64)
    beyond = ratios[last]
    while candidates.size:
        pivot = ratios[rng.choice(candidates)]
        at_most = candidates[ratios[candidates] <= pivot]
        above = candidates[ratios[candidates] > pivot]
        mass_left = mass - upper[at_most].sum()
        weight_left = remaining - weights[at_most].sum()
        following = min(beyond, ratios[above].min() if above.size else math.inf)
        if mass_left <= 0.0 or mass_left / weight_left <= following:
            if mass_left > 0.0:
                threshold = pivot
            candidates = at_most[ratios[at_most] < pivot]
            beyond = pivot
        else:
            mass, remaining, candidates = mass_left, weight_left, above
    held = ratios <= threshold
    # The cut may lie before the first candidate: then nothing is held.
    if _fits(weights, upper, np.zeros_like(held)):
        held = np.zeros_like(held)
    scale = (1.0 - upper[held].sum()) / weights[~held].sum()
    return np.where(held, upper, weights * scale)


def _fits(weights: Floats, upper: Floats, held: NDArray[np.bool_]) -> bool:
    """Whether holding these classes at their bounds leaves the others within theirs."""
    scale = (1.0 - upper[held].sum()) / weights[~held].sum()
    return bool((weights[~held] * scale <= upper[~held]).all())


def box_sorted_search(logits: Floats, lower: Floats, upper: Floats) -> Floats:
    """Solve with both bounds by the paper's Algorithm 2: sort by a / exp(g), bisect the count held."""
    scores = logits - logits.max()
    order = np.argsort(-lower / np.exp(scores), kind="stable")
    scores, low, high = scores[order], lower[order], upper[order]
    count = len(scores)

    def mass_after(k: int) -> float:
        return 1.0 - float(low[:k].sum())

    def candidate(k: int) -> Floats:
        mass = mass_after(k)
        rest = upper_bounded_sorted(scores[k:], high[k:] / mass) * mass if mass > 0.0 else low[k:] * 0.0
        return np.concatenate([low[:k], rest])

    left = 0
    right = max(k for k in range(count) if high[k:].sum() >= mass_after(k) - 1e-15)
    while left < right:
        middle = (left + right) // 2
        p = candidate(middle)
        if (p >= low - 1e-13).all() and (p <= high + 1e-13).all():
            right = middle
        else:
            left = middle + 1
    answer = np.empty(count)
    answer[order] = candidate(left)
    return answer


def one_step_greedy(logits: Floats, lower: float) -> Floats:
    """Clip the softmax from below and rescale the rest once: the known recipe that breaks its own bound."""
    p = np.exp(logits - logits.max())
    p /= p.sum()
    above = p >= lower
    p[above] *= (1.0 - lower * (~above).sum()) / p[above].sum()
    p[~above] = lower
    return np.asarray(p, np.float64)


def filled_in_order(logits: Floats, lower: Floats, upper: Floats) -> Floats:
    """Solve where no two logits are within a thousand of each other: the best classes take all they may."""
    answer = lower.astype(np.float64)
    left = 1.0 - answer.sum()
    for k in np.argsort(-logits):
        given = min(float(upper[k]) - answer[k], left)
        answer[k] += given
        left -= given
    return answer


def box_bisection(
    logits: Floats, lower: Floats, upper: Floats, temperature: float = 1.0
) -> tuple[list[Decimal], list[bool]]:
    """Solve in 60 digits: bisect the sorted breakpoints of the sum for the root, then solve its linear piece.

    Returns
    -------
    probabilities : list of K Decimal
    free : list of K bool
        The classes strictly between their bounds.
    """
    with localcontext() as context:
        context.prec = DIGITS
        low = [Decimal(float(x)) for x in lower]
        high = [Decimal(float(x)) for x in upper]
        if sum(low) >= 1:
            return low, [False] * len(low)
        if sum(high) <= 1:
            return high, [False] * len(high)
        finite = [Decimal(float(g)) for g in logits if math.isfinite(g)]
        bottom, top = min(finite), max(finite)
        rate = 1 / Decimal(temperature)
        lifted = (bottom - top) * rate - MINUS_INFINITY_GAP
        weights = [(((Decimal(float(g)) - top) * rate) if math.isfinite(g) else lifted).exp() for g in logits]

        def total(scale: Decimal) -> Decimal:
            return sum(
                (min(max(w * scale, a), b) for w, a, b in zip(weights, low, high, strict=True)), Decimal(0)
            )

        breakpoints = sorted(
            {a / w for a, w in zip(low, weights, strict=True)}
            | {b / w for b, w in zip(high, weights, strict=True)}
        )
        left, right = 0, len(breakpoints) - 1
        while right - left > 1:
            middle = (left + right) // 2
            if total(breakpoints[middle]) >= 1:
                right = middle
            else:
                left = middle
        inside = (breakpoints[left] + breakpoints[right]) / 2
        at_low = [w * inside < a for w, a in zip(weights, low, strict=True)]
        at_high = [w * inside > b for w, b in zip(weights, high, strict=True)]
        held = sum((a for a, yes in zip(low, at_low, strict=True) if yes), Decimal(0))
        held += sum((b for b, yes in zip(high, at_high, strict=True) if yes), Decimal(0))
        free = [not (x or y) for x, y in zip(at_low, at_high, strict=True)]
        weight = sum((w for w, yes in zip(weights, free, strict=True) if yes), Decimal(0))
        scale = (1 - held) / weight if weight else inside
        answer = [
            a if under else b if over else w * scale
            for w, a, b, under, over in zip(weights, low, high, at_low, at_high, strict=True)
        ]
        return answer, [a < p < b for a, p, b in zip(low, answer, high, strict=True)]
