"""Bounds on probabilities: a feasible pair, and how fitted bounds yield to the bounds of a request.

They stand between whoever sets bounds (a fit, a request) and the operator that obeys them.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


def is_traced() -> bool:
    """Whether `torch.jit.trace`, or the ONNX export that uses it, is recording."""
    jit: Any = torch.jit
    return bool(jit.is_tracing())


def sum_tolerance(num_classes: int, *dtypes: torch.dtype) -> float:
    """How far a sum of K bounds may miss 1 by nothing but rounding, in the coarsest of their dtypes.

    Each bound is rounded once and whoever made it rounded a few times more; these errors grow like the square
    root of their number.
    """
    coarsest = max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float64).eps)
    return coarsest * (8.0 + math.sqrt(num_classes))


@dataclass(frozen=True, eq=False, init=False)
class Bounds:
    """Lower and upper bounds on the probabilities of K classes, checked to be feasible.

    Feasible means 0 <= lower <= upper <= 1 for every class and, up to rounding, sum(lower) <= 1 <= sum(upper)
    for every row. Where both bounds are numbers the sums depend on K: `check` says so once K is known.

    Parameters
    ----------
    lower, upper : number, or Tensor of shape (), (K,), (N, 1) or (N, K)
        Kept as float64 tensors on the CPU. By default 0 and 1, which bound nothing.

    Raises
    ------
    ValueError
        Naming the class, the sum or the row that fails.
    """

    lower: Tensor
    upper: Tensor

    def __init__(self, lower: float | Tensor = 0.0, upper: float | Tensor = 1.0) -> None:
        for name, given in (("lower", lower), ("upper", upper)):
            value = torch.as_tensor(given, dtype=torch.float64, device="cpu").detach()
            if value.ndim > 2:
                raise ValueError(f"{name} bounds have shape {tuple(value.shape)}; they take at most (N, K)")
            object.__setattr__(self, name, value)
        _check_entries(self.lower, self.upper)
        if self.num_classes is not None:
            _check_sums(self.lower, self.upper, self.num_classes)

    @property
    def shape(self) -> torch.Size:
        """What lower and upper broadcast to."""
        return (self.lower + self.upper).shape

    @property
    def num_classes(self) -> int | None:
        """K, or None where both bounds say nothing about it."""
        return self.shape[-1] if self.shape and self.shape[-1] > 1 else None

    def check(self, num_classes: int) -> "Bounds":
        """Return these bounds, checked for K classes.

        Raises
        ------
        ValueError
            Where they are for another number of classes, or infeasible for this one.
        """
        if self.num_classes not in (None, num_classes):
            raise ValueError(f"bounds for {self.num_classes} classes cannot bound {num_classes} classes")
        if self.num_classes is None:
            _check_sums(self.lower, self.upper, num_classes)
        return self

    def yielding_to(self, request: "Bounds", num_classes: int | None = None) -> "EffectiveBounds":
        """Clip these bounds into the request's and relax them as little as feasibility needs.

        First a = clip(a_fit, a_r, b_r) and b = clip(b_fit, a_r, b_r). Where sum(a) > 1, a is drawn towards
        a_r, to a_r + t (a - a_r) with the largest t in [0, 1] for which the sum is 1; where sum(b) < 1, b is
        drawn towards b_r likewise. The result is continuous in both pairs and never leaves the request's box.

        Parameters
        ----------
        request : Bounds
            The bounds that hold in any case.
        num_classes : int, optional
            K; needed only where all four bounds are numbers per row.

        Returns
        -------
        EffectiveBounds
            The feasible pair, and which rows had to be relaxed.
        """
        known = num_classes or self.num_classes or request.num_classes
        if known is None:
            raise ValueError("the number of classes is needed where every bound is a single number")
        self.check(known)
        request.check(known)
        lower, upper, relaxed = self.meet((self.lower, self.upper), (request.lower, request.upper), known)
        rows = relaxed.squeeze(-1) if relaxed.ndim else relaxed
        per_row = (lower + upper).ndim == 2
        return EffectiveBounds(Bounds(lower, upper), rows.expand(len(lower + upper)) if per_row else rows)

    @staticmethod
    def meet(
        fitted: tuple[Tensor, Tensor], request: tuple[Tensor, Tensor], num_classes: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Do what `yielding_to` does, unchecked; whether a row was relaxed keeps the classes' axis."""
        lower, upper = (bound.clamp(*request) for bound in fitted)
        over = _row_sum(lower, num_classes) > 1.0 + sum_tolerance(num_classes)
        under = _row_sum(upper, num_classes) < 1.0 - sum_tolerance(num_classes)
        relaxed = over | under
        if is_traced() or relaxed.any():
            eased = _draw_to_sum_one(lower, request[0], num_classes).clamp(request[0], lower)
            lower = torch.where(over, eased, lower)
            eased = _draw_to_sum_one(upper, request[1], num_classes).clamp(upper, request[1])
            upper = torch.where(under, eased, upper)
        return lower, upper, relaxed


class EffectiveBounds(NamedTuple):
    """What the operator obeys once fitted bounds have met the bounds of a request.

    Attributes
    ----------
    bounds : Bounds
    relaxed : bool Tensor of shape (N,), or () where the bounds are the same for every row
        Where clipping alone left no feasible point, so that fitted bounds gave way.
    """

    bounds: Bounds
    relaxed: Tensor


def _row_sum(bound: Tensor, num_classes: int) -> Tensor:
    """Sum over the classes, keeping the axis: shape (), (1,) or (N, 1)."""
    if bound.ndim and bound.shape[-1] == num_classes:
        return bound.sum(-1, keepdim=True)
    return bound * num_classes


def _draw_to_sum_one(bound: Tensor, target: Tensor, num_classes: int) -> Tensor:
    """Move bound towards target as far as makes the sum 1: the closed form of the least relaxation."""
    here, there = _row_sum(bound, num_classes), _row_sum(target, num_classes)
    kept = ((1.0 - there) / (here - there)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).clamp(0.0, 1.0)
    given = ((1.0 - here) / (there - here)).nan_to_num(nan=1.0, posinf=1.0, neginf=1.0).clamp(0.0, 1.0)
    # From the nearer end: small bounds reached from far ones would carry the rounding of those.
    return torch.where(given < kept, bound + given * (target - bound), target + kept * (bound - target))


def _check_entries(lower: Tensor, upper: Tensor) -> None:
    """Raise where a bound is not a probability, or a lower bound lies above its upper bound."""
    try:
        shape = (lower + upper).shape
    except RuntimeError:
        raise ValueError(
            f"lower bounds of shape {tuple(lower.shape)} do not match"
            f" upper bounds of shape {tuple(upper.shape)}"
        ) from None
    low, high = lower.expand(shape), upper.expand(shape)
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


def _check_sums(lower: Tensor, upper: Tensor, num_classes: int) -> None:
    """Raise where no probability vector of K classes fits between the bounds."""
    tolerance = sum_tolerance(num_classes)
    for name, bound, side, relation in (("lower", lower, 1.0, "above"), ("upper", upper, -1.0, "below")):
        total = _row_sum(bound, num_classes)
        wrong = (total - 1.0) * side > tolerance
        if wrong.any():
            index = tuple(wrong.nonzero()[0].tolist())
            row = f" in row {index[0]}" if wrong.ndim == 2 else ""
            raise ValueError(f"the {name} bounds add up to {total[index].item()!r}{row}, {relation} 1")


def _first(wrong: Tensor) -> tuple[str, tuple[int, ...]]:
    """Where the first offending entry stands: in words, and as an index."""
    index = tuple(int(i) for i in wrong.nonzero()[0])
    words = {0: "", 1: " of class {0}", 2: " of class {1} in row {0}"}[len(index)]
    return words.format(*index), index
