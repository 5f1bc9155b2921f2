"""Slow, obvious solvers of the box-constrained softmax; `box_bisection`, in 60 digits, is the judge."""

import math
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DIGITS = 60
MINUS_INFINITY_GAP = 800
"""A logit of -inf counts as one so far below the lowest finite one: the operator's convention."""


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

    It gives the probabilities, and which classes are strictly between their bounds.
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
