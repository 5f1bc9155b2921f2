"""The CUDA engine: a Triton kernel that solves one row per program.

It stands beside the CPU engine under `op`. A row of up to 16,384 classes is looked at as a whole, a longer
one piece by piece on every pass. Nothing is read back by the host, so that nothing waits: a row that cannot
be solved comes out as NaN. The gradient is `gradients.jacobian_products`, which does not wait either.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ON_CHIP = 16_384
"""The longest row that one program holds in registers."""

PIECE = 4096
"""How much of a longer row is looked at at a time."""

PASSES = tl.constexpr(100)
"""Newton passes, every third of the later ones a bisection: far more than any row needs."""


@triton.jit
def _box(  # type: ignore[no-untyped-def] # noqa: PLR0917
    lower, upper, row, columns, inside, low_row, low_column, high_row, high_column
):
    """Load the bounds of some columns of a row, in float64."""
    low = tl.load(lower + row * low_row + columns * low_column, mask=inside, other=0.0).to(tl.float64)
    high = tl.load(upper + row * high_row + columns * high_column, mask=inside, other=0.0).to(tl.float64)
    return low, high


@triton.jit
def _split(scores, low, high, inside, anchor, scale):  # type: ignore[no-untyped-def] # noqa: PLR0917
    """At this scale: each class's value, and whether it is under, over or free of its bounds."""
    values = tl.exp(scores - anchor) * scale
    under = inside & ((values < low) | ((low == high) & (values <= high)))
    over = inside & (values > high) & ~under
    return values, under, over, inside & ~under & ~over


@triton.jit  # type: ignore[untyped-decorator]
def _forward(  # type: ignore[no-untyped-def] # noqa: PLR0915, PLR0917 - one kernel is one function
    logits, lower, upper, inverse, probabilities, side, classes, tolerance,
    low_row, low_column, high_row, high_column, inverse_row,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Solve the row of this program by Newton on the scale, inside a bracket on its logarithm."""
    row = tl.program_id(0).to(tl.int64)
    rate = tl.load(inverse + row * inverse_row)
    offsets = tl.arange(0, WIDTH)
    top = tl.full((), -float("inf"), tl.float64)
    bottom = tl.full((), float("inf"), tl.float64)
    bad = tl.full((), 0, tl.int32)
    low_sum = tl.full((), 0.0, tl.float64)
    high_sum = tl.full((), 0.0, tl.float64)
    for start in range(0, classes, WIDTH):
        columns = start + offsets
        inside = columns < classes
        found = tl.load(logits + row * classes + columns, mask=inside, other=-float("inf")).to(tl.float64)
        low, high = _box(lower, upper, row, columns, inside, low_row, low_column, high_row, high_column)
        finite = inside & (found > -float("inf"))
        wrong = (found != found) | (found == float("inf"))  # noqa: PLR0124 - the kernel language has no isnan
        wrong |= inside & ~((low >= 0) & (low <= high) & (high <= 1))
        bad += tl.sum(wrong.to(tl.int32))
        top = tl.maximum(top, tl.max(tl.where(finite, found, -float("inf"))))
        bottom = tl.minimum(bottom, tl.min(tl.where(finite, found, float("inf"))))
        low_sum += tl.sum(low)
        high_sum += tl.sum(high)
    ok = (bad == 0) & (top > -float("inf")) & (low_sum <= 1 + tolerance) & (high_sum >= 1 - tolerance)
    floor = (bottom - top) * rate - 800.0

    total = tl.full((), 0.0, tl.float64)
    high_end = tl.full((), -float("inf"), tl.float64)
    for start in range(0, classes, WIDTH):
        columns = start + offsets
        inside = columns < classes
        found = tl.load(logits + row * classes + columns, mask=inside, other=-float("inf")).to(tl.float64)
        low, high = _box(lower, upper, row, columns, inside, low_row, low_column, high_row, high_column)
        scores = tl.where(found > -float("inf"), (found - top) * rate, floor)
        total += tl.sum(tl.where(inside, tl.exp(scores), 0.0))
        reach = tl.where(inside & (high > 0), tl.log(tl.where(high > 0, high, 1.0)) - scores, -float("inf"))
        high_end = tl.maximum(high_end, tl.max(reach))

    anchor = tl.full((), 0.0, tl.float64)
    scale = 1.0 / total
    low_end = tl.full((), -800.0, tl.float64)
    going = ok & (low_sum < 1) & (high_sum > 1)
    count = tl.full((), 0, tl.int32)
    while going & (count < PASSES):
        held = tl.full((), 0.0, tl.float64)
        free_values = tl.full((), 0.0, tl.float64)
        largest = tl.full((), -float("inf"), tl.float64)
        weight = tl.full((), 0.0, tl.float64)
        for start in range(0, classes, WIDTH):
            columns = start + offsets
            inside = columns < classes
            found = tl.load(logits + row * classes + columns, mask=inside, other=-float("inf")).to(tl.float64)
            low, high = _box(lower, upper, row, columns, inside, low_row, low_column, high_row, high_column)
            scores = tl.where(found > -float("inf"), (found - top) * rate, floor)
            values, under, over, free = _split(scores, low, high, inside, anchor, scale)
            held += tl.sum(tl.where(under, low, tl.where(over, high, 0.0)))
            free_values += tl.sum(tl.where(free, values, 0.0))
            here = tl.maximum(largest, tl.max(tl.where(free, scores, -float("inf"))))
            here_or_zero = tl.where(here > -float("inf"), here, 0.0)
            kept = tl.where(largest > -float("inf"), weight * tl.exp(largest - here_or_zero), 0.0)
            weight = kept + tl.sum(tl.where(free, tl.exp(scores - here_or_zero), 0.0))
            largest = here
        mass = 1.0 - held
        excess = free_values - mass
        log_scale = tl.log(scale) - anchor
        high_end = tl.where(excess > 0, tl.minimum(high_end, log_scale), high_end)
        low_end = tl.where(excess < 0, tl.maximum(low_end, log_scale), low_end)
        middle = 0.5 * (low_end + high_end)
        possible = (weight > 0) & (mass > 0)
        step = tl.where(possible, mass, 1.0) / tl.where(weight > 0, weight, 1.0)
        newton = tl.log(step) - largest
        by_newton = possible & (newton >= low_end) & (newton <= high_end)
        by_newton = by_newton & ~((count > 6) & (count % 3 == 2))
        same = by_newton & (tl.abs(newton - log_scale) <= 4e-16 * (1 + tl.abs(newton)))
        vertex = (weight == 0) & (tl.abs(mass) <= 1e-15)
        ended = (excess == 0) | vertex | (middle <= low_end) | (middle >= high_end)
        anchor = tl.where(ended, anchor, tl.where(by_newton, largest, -middle))
        scale = tl.where(ended, scale, tl.where(by_newton, step, 1.0))
        going = going & ~(same | ended)
        count += 1

    for start in range(0, classes, WIDTH):
        columns = start + offsets
        inside = columns < classes
        found = tl.load(logits + row * classes + columns, mask=inside, other=-float("inf")).to(tl.float64)
        low, high = _box(lower, upper, row, columns, inside, low_row, low_column, high_row, high_column)
        scores = tl.where(found > -float("inf"), (found - top) * rate, floor)
        values, under, over, free = _split(scores, low, high, inside, anchor, scale)
        answer = tl.where(under, low, tl.where(over, high, tl.minimum(tl.maximum(values, low), high)))
        mark = tl.where(under, 1, tl.where(over, 2, 0))
        answer = tl.where(low_sum >= 1, low, tl.where(high_sum <= 1, high, answer))
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
        WIDTH=width, num_warps=4 if width <= 2048 else 8,
    )  # fmt: skip
    return probabilities, side


def _strides(bound: Tensor) -> tuple[int, int]:
    """Give the steps from row to row and from class to class; 0 where one value stands for all."""
    rows, columns = bound.shape
    return (columns if rows > 1 else 0), int(columns > 1)
