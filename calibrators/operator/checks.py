"""What is wrong with the operator's arguments, in words: the row, the class, the sum or the value.

Engines find out that a row is wrong at no extra cost; these slower looks then say why.
"""

from typing import Any, NoReturn

import numpy as np

Array = np.ndarray[Any, Any]


def check_values(
    logits: Array, lower: Array, upper: Array, tolerance: float, first_row: int | None = None
) -> None:
    """Raise a ValueError that names the first thing wrong with the values.

    `logits`: ndarray of shape (N, K), without NaN and +inf, and with a finite logit in every row. `lower`,
    `upper`: ndarray of shape (N or 1, K or 1), 0 <= lower <= upper <= 1, with sums on the two sides of 1.
    """
    if not logits.size:
        return
    offset = first_row or 0
    wrong = np.isnan(logits) | np.isposinf(logits)
    if wrong.any():
        row, index = _first(wrong)
        raise ValueError(f"the logit of class {index} in row {offset + row} is {logits[row, index].item()}")
    barren = np.isneginf(logits).all(-1)
    if barren.any():
        raise ValueError(f"every logit of row {offset + int(np.flatnonzero(barren)[0])} is -inf")
    for name, bound in (("lower", lower), ("upper", upper)):
        wrong = ~((bound >= 0) & (bound <= 1))
        if wrong.any():
            row, index = _first(wrong)
            place = _place(bound, row, index, first_row)
            raise ValueError(f"{name} bound {_quote(bound[row, index])}{place} is not in [0, 1]")
    wrong = lower > upper
    if wrong.any():
        row, index = _first(wrong)
        low, high = (_quote(np.broadcast_to(bound, wrong.shape)[row, index]) for bound in (lower, upper))
        place = _place(wrong, row, index, first_row)
        raise ValueError(f"lower bound {low}{place} is above upper bound {high}")
    for name, bound, sign, relation in (("lower", lower, 1.0, "above"), ("upper", upper, -1.0, "below")):
        total = bound.astype(np.float64).sum(-1) * (logits.shape[1] if bound.shape[1] == 1 else 1)
        wrong = (total - 1.0) * sign > tolerance
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            of_row = f" of row {offset + row}" if len(total) > 1 or first_row is not None else ""
            raise ValueError(
                f"the {name} bounds{of_row} add up to {_quote(total[row].astype(bound.dtype))}, {relation} 1"
            )


def raise_for_row(logits: Array, lower: Array, upper: Array, tolerance: float, row: int) -> NoReturn:
    """Raise the ValueError of a row that an engine refused."""
    shared = len(lower) == len(upper) == 1
    low, high = (bound[row : row + 1] if len(bound) > 1 else bound for bound in (lower, upper))
    one = slice(row, row + 1)
    check_values(logits[one], low[:0] if shared else low, high[:0] if shared else high, tolerance, row)
    check_values(logits[one], low, high, tolerance)
    raise ValueError(f"the bounds of row {row} leave no room for probabilities that add up to 1")


def _first(wrong: Array) -> tuple[int, int]:
    """Where the first offending entry stands."""
    row, index = np.argwhere(wrong)[0].tolist()
    return row, index


def _quote(value: Any) -> str:
    """Write a number with the digits that its dtype has."""
    return f"{value.item():.7g}" if value.dtype == np.float32 else repr(value.item())


def _place(values: Array, row: int, index: int, first_row: int | None) -> str:
    """Say whose value it is, as far as its shape tells."""
    words = [f"class {index}"] if values.shape[1] > 1 else []
    if len(values) > 1 or first_row is not None:
        words.append(f"row {(first_row or 0) + row}")
    return f" of {' in '.join(words)}" if words else ""
