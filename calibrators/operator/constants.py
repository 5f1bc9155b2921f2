"""What every engine of the operator agrees on: numbers, and how fitted bounds yield to those of a request.

Bounds meet on arrays of any library; see `Bounds.yielding_to`.
"""

import math
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

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


def check_entries(lower: Array, upper: Array) -> None:
    """Raise ValueError where a bound is not a probability, or a lower bound lies above its upper bound."""
    try:
        low, high = np.broadcast_arrays(lower, upper)
    except ValueError:
        raise ValueError(
            f"lower bounds of shape {lower.shape} do not match upper bounds of shape {upper.shape}"
        ) from None
    for name, bound in (("lower", low), ("upper", high)):
        wrong = ~((bound >= 0.0) & (bound <= 1.0))
        if wrong.any():
            where, index = _first(wrong)
            raise ValueError(f"{name} bound {bound[index].item()!r}{where} is not a probability in [0, 1]")
    wrong = low > high
    if wrong.any():
        where, index = _first(wrong)
        raise ValueError(
            f"lower bound {low[index].item()!r} is above upper bound {high[index].item()!r}{where}"
        )


def check_sums(lower: Array, upper: Array, num_classes: int) -> None:
    """Raise ValueError where no probability vector of K classes fits between the bounds."""
    tolerance = sum_tolerance(num_classes)
    for name, bound, side, relation in (("lower", lower, 1.0, "above"), ("upper", upper, -1.0, "below")):
        total = np.asarray(row_sum(bound, num_classes))
        wrong = (total - 1.0) * side > tolerance
        if wrong.any():
            index = tuple(int(i) for i in np.argwhere(wrong)[0])
            row = f" in row {index[0]}" if wrong.ndim == 2 else ""
            raise ValueError(f"the {name} bounds add up to {total[index].item()!r}{row}, {relation} 1")


def _first(wrong: Array) -> tuple[str, tuple[int, ...]]:
    """Where the first offending entry stands: in words, and as an index."""
    index = tuple(int(i) for i in np.argwhere(wrong)[0])
    words = {0: "", 1: " of class {0}", 2: " of class {1} in row {0}"}[len(index)]
    return words.format(*index), index
