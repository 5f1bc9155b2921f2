"""Bounds on probabilities: a feasible pair, and how fitted bounds yield to the bounds of a request.

They stand between whoever sets bounds (a fit, a request) and the operator that obeys them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from boxcal.calibrators import tensor_ops
from boxcal.calibrators.operator import constants
from boxcal.calibrators.operator.constants import check_entries, check_sums, meet


def is_traced() -> bool:
    """Whether `torch.jit.trace`, or the ONNX export that uses it, is recording."""
    jit: Any = torch.jit
    return bool(jit.is_tracing())


def is_plain(rows: Tensor) -> bool:
    """Whether no compiler, tracer, transform or forward-mode derivative watches.

    torch's dispatcher, which costs more than a small batch, may then be left out.
    """
    return (
        not torch.compiler.is_compiling()
        and type(rows) is Tensor
        and not is_traced()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and forward_ad._current_level < 0
    )


def sum_tolerance(num_classes: int, *dtypes: torch.dtype) -> float:
    """How far a sum of K bounds may miss 1 by nothing but rounding, in the coarsest of their dtypes."""
    coarsest = max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float64).eps)
    return constants.sum_tolerance(num_classes, coarsest)


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
        check_entries(self.lower.numpy(), self.upper.numpy())
        if self.num_classes is not None:
            check_sums(self.lower.numpy(), self.upper.numpy(), self.num_classes)

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
            check_sums(self.lower.numpy(), self.upper.numpy(), num_classes)
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
        return meet(tensor_ops, fitted, request, num_classes, always=is_traced())


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
