"""The scores of a file: finite numbers of the kind that is declared, as logits."""

from __future__ import annotations

from typing import Any

import numpy as np

from boxcal.app.http.problems import InvalidUpload
from boxcal.app.tables.arrays import Array
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.scores import ScoreLook, as_logits


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Choose how real numbers are kept: float32 for floats of at most 32 bits, otherwise float64."""
    return np.dtype(np.float32 if dtype.kind == "f" and dtype.itemsize <= 4 else np.float64)


def is_single(shape: tuple[int, ...]) -> bool:
    """Whether scores (N,) or (N, 1) are those of the second of two classes."""
    return len(shape) == 1 or (len(shape) == 2 and shape[1] == 1)


def finite_rows(name: str, block: Array, first: int) -> tuple[Array, int]:
    """Convert rows of real numbers, and count those whose probabilities were scaled."""
    with np.errstate(over="ignore"):  # infinities of the conversion are found in its result
        values = block.astype(stored_dtype(block.dtype))
    if not np.isfinite(values).all():
        row, column = (int(index) for index in np.argwhere(~np.isfinite(values))[0])
        range_ = "" if not np.isfinite(block[row, column]) else f" in {values.dtype}"
        raise InvalidUpload(
            f"{name}[{first + row}, {column}] is {block[row, column]!s}; every value must be finite{range_}."
        )
    logits, scaled = logits_of(values, name, first)
    return logits.astype(values.dtype, copy=False), scaled


def logits_of(block: Array, kind: str, first: int) -> tuple[Array, int]:
    """Turn scores (n, K) of a kind into logits, and count the rows whose sums were remarkably far from 1.

    `first`: number of the first row, for messages.
    """
    try:
        return as_logits(block, kind, first)
    except InvalidDataError as error:
        raise InvalidUpload(str(error)) from error


def check_kind(look: ScoreLook, *, is_single: bool) -> None:
    """Refuse scores that were sent as logits and look like something else."""
    if refusal := look.refusal(of_one=is_single):
        raise InvalidUpload(refusal)
