"""Logits as the feedback log stores them: 16 bits a class, beside an offset and a scale of the row.

A row g is stored as float32 `offset`, float32 `scale` (a power of 2) and float16 `(g - offset) / scale`, so

    g = offset + scale * half,   |error| <= 2^-11 * |g - offset|  (+ 2^-25 * scale near the offset)

The offset is the largest logit: the classes that matter for the probabilities are stored most exactly,
however large the logits are. The scale is 1 where the range of the row fits float16. A softmax of stored
logits at any temperature differs from that of the logits by at most 0.001 for each of up to 1,000 classes.
"""

import math

import numpy as np
from numba import njit

from boxcal.calibrators.monitoring.state import Array
from boxcal.calibrators.operator.compiling import compiled
from boxcal.calibrators.operator.cpu_math import bits, from_bits, ordered, select

HEADER = 4
"""Numbers of 16 bits before those of the classes: the offset and the scale."""
_LARGEST_HALF = float(np.finfo(np.float16).max)
_LARGEST_LOGIT = 1e38
"""Larger ones are stored as this one, so that the offset is a float32."""
_SMALLEST_NORMAL = float(np.finfo(np.float16).smallest_normal)
_ABSOLUTE, _SIGN = np.int64(2**63 - 1), np.int64(2**15)
_DROPPED, _SIGN_SHIFT, _ONE = np.int64(52 - 10), np.int64(48), np.int64(1)
_BIAS = np.int64((1023 - 15) << 52)
_BELOW_HALF = np.int64(2**41 - 1)
_SUBNORMAL = 2.0**28
"""The distance between two float64 numbers from here on is that of float16 near 0."""
_HALF_ABSOLUTE, _HALF_NORMAL = np.int64(2**15 - 1), np.int64(2**10)
_HALF_SUBNORMAL = 2.0**-24
_SUBNORMAL_BITS = np.int64(np.float64(_SUBNORMAL).view(np.int64))


def pack(logits: Array) -> Array:
    """Return logits (N, K) in the stored form, int16 (N, 4 + K)."""
    packed = np.empty((len(logits), HEADER + np.shape(logits)[1]), np.int16)
    pack_into(np.array(logits, np.float64, order="C"), packed)
    return packed


def unpack(packed: Array) -> Array:
    """Return the logits (N, K), float64, of what `pack` returned."""
    logits = np.empty((len(packed), max(0, packed.shape[1] - HEADER)))
    _unpack_into(np.ascontiguousarray(packed), logits)
    return logits


@compiled
def pack_into(logits: Array, packed: Array) -> None:
    """Fill `packed` (N, 4 + K) int16 with logits (N, K) float64, no NaN; both C-contiguous."""
    for n in range(logits.shape[0]):
        row, stored = logits[n], packed[n]
        high, low = _extremes(row)
        high = min(max(high, -_LARGEST_LOGIT), _LARGEST_LOGIT)
        offset = np.float64(np.float32(high))
        # The largest logit differs from the offset by the rounding of the offset to float32.
        spread = max(high - offset, offset - max(low, -_LARGEST_LOGIT))
        scale = 1.0
        if spread > _LARGEST_HALF:
            scale = 2.0 ** math.ceil(math.log2(spread / _LARGEST_HALF))
        stored[0], stored[1] = _halves(offset)
        stored[2], stored[3] = _halves(scale)
        _round(row, offset, 1.0 / scale, stored[HEADER:])


@compiled
def _unpack_into(packed: Array, logits: Array) -> None:
    """Fill `logits` (N, K) with what `packed` (N, 4 + K) stands for."""
    for n in range(packed.shape[0]):
        header = packed[n, :HEADER].view(np.float32)
        offset, scale = np.float64(header[0]), np.float64(header[1])
        row, stored = logits[n], packed[n, HEADER:]
        for k in range(row.shape[0]):
            half = np.int64(stored[k])
            size = half & _HALF_ABSOLUTE
            value = select(size < _HALF_NORMAL, size * _HALF_SUBNORMAL, from_bits((size << _DROPPED) + _BIAS))
            row[k] = offset + scale * select(half < 0, -value, value)


@njit(error_model="numpy")
def _halves(value: float) -> tuple[np.int16, np.int16]:
    """Lower and upper half of a float32."""
    whole = bits(np.float32(value))
    return np.int16(whole), np.int16(whole >> 16)


@njit(error_model="numpy")
def _extremes(row: Array) -> tuple[float, float]:
    """Largest and smallest entry, by integers that sort as the floats do: their maximum vectorises."""
    high = ordered(bits(row[0]))
    low = high
    for k in range(1, row.shape[0]):
        value = ordered(bits(row[k]))
        high = select(value > high, value, high)
        low = select(value < low, value, low)
    return from_bits(ordered(high)), from_bits(ordered(low))


@njit(error_model="numpy")
def _round(row: Array, offset: float, inverse: float, halves: Array) -> None:
    """Fill `halves` with the bits of `(row - offset) * inverse` as float16, ties to even.

    Integer arithmetic vectorises; conversions to float16 do not. A normal number drops 42 bits of its
    fraction and changes the bias of its exponent; for a subnormal one the addition of 2^28 rounds.
    """
    for k in range(row.shape[0]):
        raw = bits((row[k] - offset) * inverse)
        size = from_bits(raw & _ABSOLUTE)
        size = select(size > _LARGEST_HALF, _LARGEST_HALF, size)
        whole = bits(size)
        normal = (whole - _BIAS + _BELOW_HALF + ((whole >> _DROPPED) & _ONE)) >> _DROPPED
        tiny = bits(size + _SUBNORMAL) - _SUBNORMAL_BITS
        half = select(size < _SMALLEST_NORMAL, tiny, normal)
        halves[k] = np.int16(half | ((raw >> _SIGN_SHIFT) & _SIGN))
