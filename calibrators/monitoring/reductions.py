"""Maxima that LLVM turns into vector instructions, for the compiled loops of the monitor."""

from typing import Any

import numpy as np
from numba import njit

from boxcal.calibrators.operator.cpu_math import bits, from_bits, select

Array = np.ndarray[Any, Any]


@njit(error_model="numpy")
def largest_of(values: Array) -> float:
    """Return the largest of float64 numbers (K,) of at least 0: their bits sort as they do."""
    found = bits(values[0])
    for k in range(1, values.shape[0]):
        value = bits(values[k])
        found = select(value > found, value, found)
    return from_bits(found)  # type: ignore[no-any-return]
