"""What is wrong with the operator's arguments, in words: the row, the class, the sum or the value.

Engines find out that a row is wrong at no extra cost; these slower looks then say why.
"""

from typing import NoReturn

import torch
from torch import Tensor


def check_values(logits: Tensor, lower: Tensor, upper: Tensor, tolerance: float, first_row: int = 0) -> None:
    """Raise a ValueError that names the first thing wrong with the values.

    Parameters
    ----------
    logits : Tensor of shape (N, K)
        Without NaN and +inf, and with a finite logit in every row.
    lower, upper : Tensor of shape (N or 1, K or 1)
        0 <= lower <= upper <= 1, with sums on the two sides of 1.
    tolerance : float
        How far the sums may miss 1.
    first_row : int
        What to add to the rows' numbers.
    """
    if not logits.numel():
        return
    wrong = logits.isnan() | logits.isposinf()
    if wrong.any():
        row, index = _first(wrong)
        raise ValueError(
            f"the logit of class {index} in row {first_row + row} is {logits[row, index].item()}"
        )
    barren = logits.isneginf().all(-1)
    if barren.any():
        raise ValueError(f"every logit of row {first_row + int(barren.nonzero()[0])} is -inf")
    for name, bound in (("lower", lower), ("upper", upper)):
        wrong = ~((bound >= 0) & (bound <= 1))
        if wrong.any():
            row, index = _first(wrong)
            value = bound[row, index].item()
            raise ValueError(
                f"{name} bound {value:.9g} of {_place(bound, row, index, first_row)} is not in [0, 1]"
            )
    wrong = lower > upper
    if wrong.any():
        row, index = _first(wrong)
        values = [bound.expand_as(wrong)[row, index].item() for bound in (lower, upper)]
        raise ValueError(
            f"lower bound {values[0]:.9g} is above upper bound {values[1]:.9g}"
            f" for {_place(wrong, row, index, first_row)}"
        )
    classes = logits.shape[1]
    for name, bound, sign, relation in (("lower", lower, 1.0, "above"), ("upper", upper, -1.0, "below")):
        total = bound.to(torch.float64).sum(-1) * (classes if bound.shape[1] == 1 else 1)
        wrong = (total - 1.0) * sign > tolerance
        if wrong.any():
            row = int(wrong.nonzero()[0])
            place = "" if len(total) == 1 and first_row == 0 else f" of row {first_row + row}"
            raise ValueError(f"the {name} bounds{place} add up to {total[row].item():.9g}, {relation} 1")


def raise_for_row(logits: Tensor, lower: Tensor, upper: Tensor, tolerance: float, row: int) -> NoReturn:
    """Raise the ValueError of a row that an engine refused."""
    low, high = (bound[row : row + 1] if len(bound) > 1 else bound for bound in (lower, upper))
    check_values(logits[row : row + 1], low, high, tolerance, row)
    raise ValueError(f"the bounds of row {row} leave no room for probabilities that add up to 1")


def _first(wrong: Tensor) -> tuple[int, int]:
    row, index = wrong.nonzero()[0].tolist()
    return row, index


def _place(values: Tensor, row: int, index: int, first_row: int) -> str:
    """Say where a value stands, as far as its shape tells."""
    words = [f"class {index}"] if values.shape[1] > 1 else []
    words += [f"row {first_row + row}"] if len(values) > 1 or first_row else []
    return " in ".join(words) or "every class"
