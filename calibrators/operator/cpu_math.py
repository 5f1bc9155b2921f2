"""Arithmetic that LLVM turns into vector instructions: the exponential, and selections without branches.

It stands below `cpu_loops`. Without Intel's SVML numba calls a scalar exp; a polynomial vectorises.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

_INT_OF: dict[Any, Any] = {types.float32: types.int32, types.float64: types.int64}
_FLOAT_OF: dict[Any, Any] = {integer: floating for floating, integer in _INT_OF.items()}


def _bits(_context: Any, value: Any) -> tuple[Any, Any]:
    """Read the bits of a float as the integer of its width."""
    target = _INT_OF[value]
    return target(value), lambda c, builder, _s, args: builder.bitcast(args[0], c.get_value_type(target))


def _from_bits(_context: Any, value: Any) -> tuple[Any, Any]:
    """Read an integer as the float of its width."""
    target = _FLOAT_OF[value]
    return target(value), lambda c, builder, _s, args: builder.bitcast(args[0], c.get_value_type(target))


def _ordered(_context: Any, value: Any) -> tuple[Any, Any]:
    """Turn the bits of a float into an integer that sorts as the float does, and back: its own inverse.

    NaN sorts above infinity, or below minus infinity when its sign bit is set. Integers have a maximum that
    vectorises; floats do not, while NaN is in sight.
    """

    def generate(_c: Any, builder: Any, _s: Any, args: Any) -> Any:
        width = value.bitwidth
        sign = builder.ashr(args[0], ir.Constant(args[0].type, width - 1))
        return builder.xor(args[0], builder.and_(sign, ir.Constant(args[0].type, 2 ** (width - 1) - 1)))

    return value(value), generate


def _select(_context: Any, _condition: Any, yes: Any, no: Any) -> tuple[Any, Any]:
    """Choose between two values that are both computed: a branch would keep a loop from vectorising."""
    signature = yes(types.boolean, yes, no)
    return signature, lambda _c, builder, _s, args: builder.select(*args)


def _wide(_context: Any) -> tuple[Any, Any]:
    """Let LLVM use vectors of 512 bits here, of which it makes halves for the sake of older processors."""

    def generate(context: Any, builder: Any, _s: Any, _args: Any) -> Any:
        # llvmlite's own method refuses attributes that have a value.
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.none(), generate


bits: Callable[..., Any] = intrinsic(_bits)
from_bits: Callable[..., Any] = intrinsic(_from_bits)
ordered: Callable[..., Any] = intrinsic(_ordered)
select: Callable[..., Any] = intrinsic(_select)
wide: Callable[..., Any] = intrinsic(_wide)


def fast_exp(x: float) -> float:
    """Compute exp(x) to about one unit in the last place.

    Below the smallest normal number, and of NaN, it is 0; above exp(80) in float32 and exp(600) in float64 it
    stays there.
    """
    return math.exp(x)


_F = np.float32
_LOG2E_32, _ROUND_32, _FLOOR_32, _CEILING_32 = _F(1 / math.log(2)), _F(1.5 * 2**23), _F(-87.33655), _F(80)
_HIGH_32 = _F(round(math.log(2) * 2**15) / 2**15)
_LOW_32 = _F(math.log(2) - float(_HIGH_32))
_C32 = tuple(map(_F, (1, 1, 0.4999999343, 0.1666652040, 0.0416683908, 0.0083687452, 0.0013814540)))
"""Polynomial of least relative error, 3e-9, on half a logarithm of 2 around 0."""
_LOG2E_64, _ROUND_64, _FLOOR_64, _CEILING_64 = 1 / math.log(2), 1.5 * 2.0**52, -708.0, 600.0
_HIGH_64 = round(math.log(2) * 2**32) / 2**32
_LOW_64 = 2.3190468138462996e-17 + (math.log(2) - _HIGH_64)
_C64 = tuple(1 / math.factorial(n) for n in range(14))
_ZERO_32, _SHIFT_32, _SHIFT_64 = _F(0), np.int32(23), np.int64(52)


@njit(fastmath={"contract"}, error_model="numpy", forceinline=True)
def _polynomial(coefficients: tuple[Any, ...], x: Any) -> Any:
    """Horner's scheme, which LLVM unrolls."""
    y = coefficients[-1]
    for k in range(len(coefficients) - 2, -1, -1):
        y = y * x + coefficients[k]
    return y


@njit(fastmath={"contract"}, error_model="numpy")
def _exp_32(x: Any) -> Any:
    x = select(x > _CEILING_32, _CEILING_32, x)
    shifted = x * _LOG2E_32 + _ROUND_32
    power = shifted - _ROUND_32
    r = (x - power * _HIGH_32) - power * _LOW_32
    y = _polynomial(_C32, r)
    scaled = from_bits(np.int32(bits(y) + (bits(shifted) << _SHIFT_32)))
    return select(x >= _FLOOR_32, scaled, _ZERO_32)


@njit(fastmath={"contract"}, error_model="numpy")
def _exp_64(x: Any) -> Any:
    x = select(x > _CEILING_64, _CEILING_64, x)
    shifted = x * _LOG2E_64 + _ROUND_64
    power = shifted - _ROUND_64
    r = (x - power * _HIGH_64) - power * _LOW_64
    y = _polynomial(_C64, r)
    scaled = from_bits(bits(y) + (bits(shifted) << _SHIFT_64))
    return select(x >= _FLOOR_64, scaled, 0.0)


@overload(fast_exp)
def _fast_exp(x):  # type: ignore[no-untyped-def] # numba compares annotations
    chosen = _exp_32 if x == types.float32 else _exp_64
    return lambda x: chosen(x)  # noqa: PLW0108 - numba reads the argument's name
