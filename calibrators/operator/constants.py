"""What every engine of the operator agrees on: numbers, and how fitted bounds yield to those of a request.

It works on arrays of any library and imports none; see `Bounds.yielding_to`.
"""

import math
import sys
from typing import Any

FREE, AT_LOWER, AT_UPPER = 0, 1, 2
"""Which bound holds a class."""

UNDERFLOW = 800.0
"""exp(-800) is zero in float64: how far below every finite logit a logit of -inf is placed."""


def sum_tolerance(num_classes: int, eps: float = sys.float_info.epsilon) -> float:
    """How far a sum of K bounds may miss 1 by nothing but rounding, in a dtype of this machine epsilon.

    Each bound is rounded once and whoever made it rounded a few times more; these errors grow like the square
    root of their number.
    """
    return eps * (8.0 + math.sqrt(num_classes))


Values = Any
"""An ndarray, or a tensor where the operations are those of `tensor_ops`."""


def meet(
    ops: Any, fitted: tuple[Values, Values], request: tuple[Values, Values], num_classes: int, *, always: bool
) -> tuple[Values, Values, Values]:
    """Clip fitted bounds into the request's and relax them as little as feasibility needs, unchecked.

    `fitted`, `request`: lower and upper bounds, each (), (K,), (N, 1) or (N, K), float64. Returns lower and
    upper bounds, and whether a row was relaxed; this keeps the classes' axis.
    """
    lower, upper = (ops.clip(bound, *request) for bound in fitted)
    over = row_sum(lower, num_classes) > 1.0 + sum_tolerance(num_classes)
    under = row_sum(upper, num_classes) < 1.0 - sum_tolerance(num_classes)
    relaxed = over | under
    if always or relaxed.any():
        eased = ops.clip(_draw_to_sum_one(ops, lower, request[0], num_classes), request[0], lower)
        lower = ops.where(over, eased, lower)
        eased = ops.clip(_draw_to_sum_one(ops, upper, request[1], num_classes), upper, request[1])
        upper = ops.where(under, eased, upper)
    return lower, upper, relaxed


def row_sum(bound: Values, num_classes: int) -> Values:
    """Sum over the classes, keeping the axis: shape (), (1,) or (N, 1)."""
    if bound.ndim and bound.shape[-1] == num_classes:
        return bound.sum(-1, keepdims=True)
    return bound * num_classes


def _draw_to_sum_one(ops: Any, bound: Values, target: Values, num_classes: int) -> Values:
    """Move bound towards target as far as makes the sum 1: the closed form of the least relaxation."""
    here, there = row_sum(bound, num_classes), row_sum(target, num_classes)
    kept = ops.nan_to_num((1.0 - there) / (here - there), nan=0.0, posinf=0.0, neginf=0.0)
    given = ops.nan_to_num((1.0 - here) / (there - here), nan=1.0, posinf=1.0, neginf=1.0)
    kept, given = ops.clip(kept, 0.0, 1.0), ops.clip(given, 0.0, 1.0)
    # From the nearer end: small bounds reached from far ones would carry the rounding of those.
    return ops.where(given < kept, bound + given * (target - bound), target + kept * (bound - target))
