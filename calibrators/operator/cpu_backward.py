"""The CPU engine's gradient: the Jacobian products of the operator, two passes over a row.

`cpu_kernel` hands arrays down, in the layout that `cpu_loops` left behind.
"""

import math
from typing import Any

import numpy as np

from boxcal.calibrators.operator.compiling import compiled, inner
from boxcal.calibrators.operator.constants import AT_LOWER, AT_UPPER, FREE
from boxcal.calibrators.operator.cpu_loops import SUMMING, own
from boxcal.calibrators.operator.cpu_math import select
from boxcal.calibrators.operator.exact_row import Array
from boxcal.calibrators.operator.teams import share


@inner(fastmath=SUMMING)
def _free_sums(upstream: Array, probabilities: Array, side: Array) -> tuple[float, float]:
    """Mass of the free classes, and their sum of probability times upstream gradient."""
    zero, mass, product = probabilities.dtype.type(0), 0.0, 0.0
    for i in range(side.shape[0]):
        p = select(side[i] == FREE, probabilities[i], zero)
        mass += np.float64(p)
        product += np.float64(p * upstream[i])
    return mass, product


@inner(fastmath=SUMMING)
def _product(left: Array, right: Array, n: int) -> float:
    """Sum of the products of two rows; given whole, as slices would cost a short row more than its sum."""
    total = 0.0
    for i in range(left.shape[1]):
        total += np.float64(left[n, i] * right[n, i])
    return total


@inner(fastmath=SUMMING)
def _by_free_logits(  # noqa: PLR0917 - compiled loops take arrays by position
    upstream: Array, probabilities: Array, n: int, mean: float, inverse: float, out: Array
) -> None:
    """Gradient in the logits of row n where every class is free: that of a softmax."""
    for i in range(out.shape[1]):
        out[n, i] = probabilities[n, i] * (upstream[n, i] - mean) * inverse


@inner()
def _mean_without_mass(upstream: Array, logits: Array, side: Array, inverse: float) -> float:
    """Mean upstream gradient of free classes of probability 0, in the ratio of their exponentials."""
    top, total, product = -math.inf, 0.0, 0.0
    for i in range(side.shape[0]):
        if side[i] == FREE:
            top = max(top, np.float64(logits[i]))
    for i in range(side.shape[0]):
        if side[i] == FREE:
            weight = math.exp((np.float64(logits[i]) - top) * inverse) if top > -math.inf else 1.0
            total += weight
            product += weight * upstream[i]
    return product / total if total > 0.0 else math.nan


@inner(fastmath=SUMMING)
def _by_logits(  # noqa: PLR0917 - compiled loops take arrays by position
    upstream: Array, probabilities: Array, side: Array, mean: float, inverse: float, out: Array
) -> None:
    """Gradient in the logits: only free classes have one."""
    zero = probabilities.dtype.type(0)
    for i in range(side.shape[0]):
        slope = probabilities[i] * (upstream[i] - mean) * inverse
        out[i] = select(side[i] == FREE, slope, zero)


@inner(fastmath=SUMMING)
def _by_bound(upstream: Array, side: Array, which: int, mean: float, out: Array) -> None:
    """Gradient in the bounds of one side; summed over the classes where out has room for one number."""
    zero = upstream.dtype.type(0)
    if out.shape[0] == side.shape[0]:
        for i in range(side.shape[0]):
            out[i] = select(side[i] == which, upstream[i] - mean, zero)
        return
    total = 0.0
    for i in range(side.shape[0]):
        total += np.float64(select(side[i] == which, upstream[i] - mean, zero))
    out[0] = total


@inner()
def _by_temperature(logits: Array, by_logits: Array, inverse: float) -> float:
    """Gradient in the row's temperature, from the gradient in its logits."""
    top, total = -math.inf, 0.0
    for i in range(logits.shape[0]):
        if by_logits[i] != 0.0:
            top = max(top, np.float64(logits[i]))
    for i in range(logits.shape[0]):
        if by_logits[i] != 0.0:
            total += np.float64(by_logits[i]) * (np.float64(logits[i]) - top)
    return -total * inverse


@inner()
def _rows(part: int, parts: int, arguments: tuple[Any, ...]) -> None:
    """Fill the gradients of this part of the rows."""
    upstream, probabilities, side, held, logits, inverse = arguments[:6]
    by_logits, by_lower, by_upper, by_temperature = arguments[6:]
    kind = probabilities.dtype.type
    for n in range(side.shape[0] * part // parts, side.shape[0] * (part + 1) // parts):
        rate = inverse[own(n, inverse)]
        movable = held[own(n, held)]
        if movable:
            mass, product = _free_sums(upstream[n], probabilities[n], side[n])
            mean = product / mass if mass > 0.0 else _mean_without_mass(upstream[n], logits[n], side[n], rate)
            movable = mass > 0.0 or not math.isnan(mean)
            if movable:
                _by_logits(upstream[n], probabilities[n], side[n], kind(mean), kind(rate), by_logits[n])
            else:
                by_logits[n] = 0
        else:
            mean = _product(upstream, probabilities, n)
            _by_free_logits(upstream, probabilities, n, kind(mean), kind(rate), by_logits)
        if not (by_lower.shape[1] or by_upper.shape[1] or by_temperature.shape[0]):
            continue
        for which, by_bound in ((AT_LOWER, by_lower), (AT_UPPER, by_upper)):
            if by_bound.shape[1] and movable:
                _by_bound(upstream[n], side[n], which, kind(mean), by_bound[n])
            elif by_bound.shape[1]:
                by_bound[n] = 0
        if by_temperature.shape[0]:
            by_temperature[n] = _by_temperature(logits[n], by_logits[n], rate)


@compiled
def backward_rows(  # noqa: PLR0917 - compiled loops take arrays by position
    upstream: Array,
    probabilities: Array,
    side: Array,
    held: Array,
    logits: Array,
    inverse: Array,
    by_logits: Array,
    by_lower: Array,
    by_upper: Array,
    by_temperature: Array,
    team: tuple[int, int],
) -> None:
    """Fill the gradients; one that nobody asks for has no columns.

    `upstream`, `probabilities`, `logits`, `by_logits`: ndarray of shape (N, K), of one dtype. `side`: int8
    ndarray of shape (N, K). `held`: bool ndarray of shape (N or 1,), False where every class of the row is
    known to be free, so that its sides need no look. `inverse`: float64 ndarray of shape (N or 1,).
    `by_lower`, `by_upper`: ndarray of shape (N, K), (N, 1) for the sum over the classes, or (0, 0).
    `by_temperature`: float64 ndarray of shape (N,) or (0,). `team`: as `share` takes it.
    """
    given = (upstream, probabilities, side, held, logits, inverse)
    share(team, _rows, (*given, by_logits, by_lower, by_upper, by_temperature))
