"""Rounding of float64 to float16 by integer arithmetic, which vectorises; NumPy converts number by number."""

import numpy as np

from boxcal.calibrators.operator.compiling import compiled
from boxcal.calibrators.operator.cpu_math import bits, from_bits, select
from boxcal.calibrators.operator.exact_row import Array

LARGEST = float(np.finfo(np.float16).max)
_SMALLEST_NORMAL = float(np.finfo(np.float16).smallest_normal)
_ABSOLUTE, _SIGN = np.int64(2**63 - 1), np.int64(2**15)
_DROPPED, _SIGN_SHIFT, _ONE = np.int64(52 - 10), np.int64(48), np.int64(1)
_BIAS = np.int64((1023 - 15) << 52)
_BELOW_HALF = np.int64(2**41 - 1)
_SUBNORMAL = 2.0**28
"""The distance between two float64 numbers from here on is that of float16 near 0."""
_SUBNORMAL_BITS = np.int64(np.float64(_SUBNORMAL).view(np.int64))


@compiled
def round_to_half(numbers: Array, halves: Array) -> None:
    """Fill `halves` (N, K) with the bits of `numbers` (N, K) as float16, ties to even.

    Parameters
    ----------
    numbers
        float64, no NaN; those beyond the range of float16 become its largest or smallest number.
    halves
        int16.
    """
    for n in range(numbers.shape[0]):
        row, own = numbers[n], halves[n]
        for k in range(row.shape[0]):
            raw = bits(row[k])
            size = from_bits(raw & _ABSOLUTE)
            size = select(size > LARGEST, LARGEST, size)
            whole = bits(size)
            normal = (whole - _BIAS + _BELOW_HALF + ((whole >> _DROPPED) & _ONE)) >> _DROPPED
            tiny = bits(size + _SUBNORMAL) - _SUBNORMAL_BITS
            half = select(size < _SMALLEST_NORMAL, tiny, normal)
            own[k] = np.int16(half | ((raw >> _SIGN_SHIFT) & _SIGN))
