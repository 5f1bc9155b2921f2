"""The CUDA engine: a Triton kernel that solves one row per program.

It stands beside the CPU engine under `op`. A row of up to 16,384 classes is read once, solved on the chip and
written once; a longer one is read piece by piece on every pass. Nothing is read back by the host, so that
nothing waits: a row that cannot be solved comes out as NaN. The gradient is `gradients.jacobian_products`,
which does not wait either.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from boxcal.calibrators.operator import constants

ON_CHIP = 16_384
"""The longest row that one program holds in registers."""

PIECE = 4096
"""How much of a longer row is looked at at a time."""

PASSES = tl.constexpr(400)
"""Far above what picking breakpoints at random needs (about 30); reaching it would be a defect."""

LAST_STEPS = tl.constexpr(4)
"""Newton steps that only rounding can call for, once no class meets a bound inside the bracket."""

STRIDE = tl.constexpr(7919)
"""A prime by which the picks of breakpoints move on from pass to pass."""

UNDERFLOW = tl.constexpr(constants.UNDERFLOW)

SHUFFLE = tl.constexpr(2_654_435_761)
"""An odd number (Knuth's for hashing): multiples of it, modulo 2 to the 32nd, shuffle the classes."""

EPSILON = tl.constexpr(2.3e-16)
"""A little more than the rounding of float64: no number stays the same when it loses so much of itself."""


@triton.jit
def _load(source, columns):  # type: ignore[no-untyped-def]
    """Load some columns of a row and their bounds, in the dtype that they have, and say which exist."""
    logits, lower, upper, row, classes, low_row, low_column, high_row, high_column = source
    inside = columns < classes
    found = tl.load(logits + row * classes + columns, mask=inside, other=-float("inf"))
    low = tl.load(lower + row * low_row + columns * low_column, mask=inside, other=0.0)
    high = tl.load(upper + row * high_row + columns * high_column, mask=inside, other=0.0)
    return columns, inside, found, low, high


@triton.jit
def _wide(found, low, high, below):  # type: ignore[no-untyped-def]
    """Halves of logits, so that no difference overflows, -inf placed below them, and bounds: in float64."""
    halves = 0.5 * found.to(tl.float64)
    return tl.where(halves > -float("inf"), halves, below), low.to(tl.float64), high.to(tl.float64)


@triton.jit
def _split(halves, low, high, inside, rate, anchor, scale):  # type: ignore[no-untyped-def] # noqa: PLR0917
    """At this scale: each class's value, and whether it is under, over or free of its bounds."""
    values = tl.exp((halves - anchor) * rate) * scale
    under = inside & ((values < low) | ((low == high) & (values <= high)))
    over = inside & (values > high) & ~under
    return values, under, over, inside & ~under & ~over


@triton.jit
def _is_above(anchor, log_scale, other_anchor, other_log_scale, rate):  # type: ignore[no-untyped-def]
    """Whether the first pair of anchor and scale stands for more than the second."""
    apart = tl.minimum(tl.maximum((anchor - other_anchor) * rate, -1e308), 1e308)
    return log_scale - other_log_scale > apart


@triton.jit
def _pick(  # type: ignore[no-untyped-def] # noqa: PLR0917
    halves, bound, inside, keys, rate, floor, floor_log, ceiling, ceiling_log, key, met, met_bound
):
    """Keep, of the points between two others at which classes meet a bound, that of the largest key."""
    between = inside & (bound > 0)
    log_bound = tl.log(tl.where(between, bound, 1.0))
    between = between & _is_above(halves, log_bound, floor, floor_log, rate)
    between = between & _is_above(ceiling, ceiling_log, halves, log_bound, rate)
    best = tl.max(tl.where(between, keys, -1))
    chosen = between & (keys == best)
    better = best > key
    met = tl.where(better, tl.max(tl.where(chosen, halves, -float("inf"))), met)
    met_bound = tl.where(better, tl.max(tl.where(chosen, bound, 0.0)), met_bound)
    return tl.maximum(key, best), met, met_bound


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def] # noqa: PLR0912, PLR0915, PLR0917 - one kernel is one function
    logits, lower, upper, inverse, probabilities, side, classes, tolerance,
    low_row, low_column, high_row, high_column, inverse_row,
    WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Solve the row of this program, pass by pass over what WIDTH holds.

    Newton steps inside a bracket; where one leaves it, the next point is one at which some class inside the
    bracket meets a bound, picked by a hash of its index: such picks alone would end the search, too.
    """
    row = tl.program_id(0).to(tl.int64)
    rate = tl.minimum(2.0 * tl.load(inverse + row * inverse_row), 1.7e308)
    offsets = tl.arange(0, WIDTH)
    source = logits, lower, upper, row, classes, low_row, low_column, high_row, high_column
    if WHOLE:
        columns, inside, found, low, high = _load(source, offsets)
    top = tl.full((), -float("inf"), tl.float64)
    bottom = tl.full((), float("inf"), tl.float64)
    bad = tl.full((), 0, tl.int32)
    low_sum = tl.full((), 0.0, tl.float64)
    high_sum = tl.full((), 0.0, tl.float64)
    for start in range(0, classes, WIDTH):
        if not WHOLE:
            columns, inside, found, low, high = _load(source, start + offsets)
        halves = 0.5 * found.to(tl.float64)
        finite = inside & (halves > -float("inf"))
        wrong = (found != found) | (found == float("inf"))  # noqa: PLR0124 - the kernel language has no isnan
        wrong |= inside & ~((low >= 0) & (low <= high) & (high <= 1))
        bad += tl.sum(wrong.to(tl.int32))
        top = tl.maximum(top, tl.max(tl.where(finite, halves, -float("inf"))))
        bottom = tl.minimum(bottom, tl.min(tl.where(finite, halves, float("inf"))))
        low_sum += tl.sum(low.to(tl.float64))
        high_sum += tl.sum(high.to(tl.float64))
    ok = (bad == 0) & (top > -float("inf")) & (low_sum <= 1 + tolerance) & (high_sum >= 1 - tolerance)
    below = bottom - tl.maximum(UNDERFLOW / rate, tl.abs(bottom) * EPSILON)

    total = tl.full((), 0.0, tl.float64)
    for start in range(0, classes, WIDTH):
        if not WHOLE:
            columns, inside, found, low, high = _load(source, start + offsets)
        halves, _, _ = _wide(found, low, high, below)
        total += tl.sum(tl.where(inside, tl.exp((halves - top) * rate), 0.0))

    anchor, scale = top, 1.0 / total
    floor = tl.full((), 0.0, tl.float64)
    floor_log = tl.full((), -float("inf"), tl.float64)
    ceiling = tl.full((), 0.0, tl.float64)
    ceiling_log = tl.full((), float("inf"), tl.float64)
    going = ok & (low_sum < 1) & (high_sum > 1)
    count = tl.full((), 0, tl.int64)
    last_steps = tl.full((), 0, tl.int32)
    while going & (count < PASSES):
        held = tl.full((), 0.0, tl.float64)
        free_values = tl.full((), 0.0, tl.float64)
        largest = tl.full((), -float("inf"), tl.float64)
        weight = tl.full((), 0.0, tl.float64)
        for start in range(0, classes, WIDTH):
            if not WHOLE:
                columns, inside, found, low, high = _load(source, start + offsets)
            halves, wide_low, wide_high = _wide(found, low, high, below)
            values, under, over, free = _split(halves, wide_low, wide_high, inside, rate, anchor, scale)
            held += tl.sum(tl.where(under, wide_low, tl.where(over, wide_high, 0.0)))
            free_values += tl.sum(tl.where(free, values, 0.0))
            here = tl.maximum(largest, tl.max(tl.where(free, halves, -float("inf"))))
            from_here = tl.where(here > -float("inf"), here, 0.0)
            kept = tl.where(largest > -float("inf"), weight * tl.exp((largest - from_here) * rate), 0.0)
            weight = kept + tl.sum(tl.where(free, tl.exp((halves - from_here) * rate), 0.0))
            largest = here
        mass = 1.0 - held
        excess = free_values - mass
        ceiling_log = tl.where(excess > 0, tl.log(scale), ceiling_log)
        ceiling = tl.where(excess > 0, anchor, ceiling)
        floor_log = tl.where(excess < 0, tl.log(scale), floor_log)
        floor = tl.where(excess < 0, anchor, floor)

        possible = (weight > 0) & (mass > 0)
        step = tl.where(possible, mass, 1.0) / tl.where(weight > 0, weight, 1.0)
        by_newton = possible & ~((count > 6) & (count % 3 == 2))
        by_newton = by_newton & ~_is_above(floor, floor_log, largest, tl.log(step), rate)
        by_newton = by_newton & ~_is_above(largest, tl.log(step), ceiling, ceiling_log, rate)
        settled = (excess == 0) | ((weight == 0) & (tl.abs(mass) <= 1e-15))
        settled = settled | (possible & (largest == anchor) & (tl.abs(step - scale) <= 4e-16 * scale))
        key = tl.full((), -1, tl.int64)
        met = tl.full((), 0.0, tl.float64)
        met_bound = tl.full((), 0.0, tl.float64)
        if ~settled & ~by_newton:
            for start in range(0, classes, WIDTH):
                if not WHOLE:
                    columns, inside, found, low, high = _load(source, start + offsets)
                halves, wide_low, wide_high = _wide(found, low, high, below)
                keys = (2 * columns.to(tl.int64) * SHUFFLE + count * STRIDE) & 0xFFFFFFFF
                key, met, met_bound = _pick(
                    halves, wide_low, inside, keys, rate, floor, floor_log, ceiling, ceiling_log,
                    key, met, met_bound,
                )  # fmt: skip
                key, met, met_bound = _pick(
                    halves, wide_high, inside, keys ^ 1, rate, floor, floor_log, ceiling, ceiling_log,
                    key, met, met_bound,
                )  # fmt: skip
        at_last = ~by_newton & (met_bound == 0)
        settled = settled | (at_last & (~possible | (last_steps == LAST_STEPS)))
        last_steps += at_last.to(tl.int32)
        by_newton = by_newton | at_last
        anchor = tl.where(settled, anchor, tl.where(by_newton, largest, met))
        scale = tl.where(settled, scale, tl.where(by_newton, step, met_bound))
        going = going & ~settled
        count += 1

    for start in range(0, classes, WIDTH):
        if not WHOLE:
            columns, inside, found, low, high = _load(source, start + offsets)
        halves, wide_low, wide_high = _wide(found, low, high, below)
        values, under, over, free = _split(halves, wide_low, wide_high, inside, rate, anchor, scale)
        answer = tl.minimum(tl.maximum(values, wide_low), wide_high)
        answer = tl.where(under, wide_low, tl.where(over, wide_high, answer))
        mark = tl.where(under, 1, tl.where(over, 2, 0))
        answer = tl.where(low_sum >= 1, wide_low, tl.where(high_sum <= 1, wide_high, answer))
        mark = tl.where(low_sum >= 1, 1, tl.where(high_sum <= 1, 2, mark))
        answer = tl.where(ok, answer, float("nan"))
        where = row * classes + columns
        tl.store(probabilities + where, answer.to(probabilities.dtype.element_ty), mask=inside)
        tl.store(side + where, mark.to(tl.int8), mask=inside)


def forward(
    logits: Tensor, lower: Tensor, upper: Tensor, temperature: Tensor, tolerance: float
) -> tuple[Tensor, Tensor]:
    """Solve rows of float32 or float64 on the device; shapes as in `torch_solver.solve`."""
    logits = logits.contiguous()
    rows, classes = logits.shape
    probabilities = torch.empty_like(logits)
    side = torch.empty_like(logits, dtype=torch.int8)
    inverse = (1.0 / temperature.to(torch.float64)).reshape(-1).contiguous()
    lower, upper = lower.contiguous(), upper.contiguous()
    width = min(triton.next_power_of_2(classes), ON_CHIP if classes <= ON_CHIP else PIECE)
    _forward[(rows,)](
        logits, lower, upper, inverse, probabilities, side, classes, tolerance,
        *_strides(lower), *_strides(upper), int(len(inverse) > 1),
        WIDTH=width, WHOLE=classes <= width, num_warps=4 if width <= 2048 else 8 if width <= 4096 else 16,
    )  # fmt: skip
    return probabilities, side


def _strides(bound: Tensor) -> tuple[int, int]:
    """Give the steps from row to row and from class to class; 0 where one value stands for all."""
    rows, columns = bound.shape
    return (columns if rows > 1 else 0), int(columns > 1)
