"""The engines against a judge of 60 digits, over rows made to break them; how often they look at a row."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.operator import passes, problems
from boxcal.calibrators.operator import box_constrained_softmax
from boxcal.calibrators.operator.torch_solver import solve
from tests.calibrators.operator.adversary import Rows, adversarial_rows
from tests.reference import box_bisection

Engine = Callable[[Tensor, Tensor, Tensor], Tensor]

ABSOLUTE = {np.float64: 1e-12, np.float32: 1e-7}
RELATIVE_WHERE_FREE = 1e-5
"""Asked of float32, for probabilities that float32 can hold with all its digits. The reference engine adds
bounds with ordinary sums and does not promise it where almost no mass is free."""


def torch_engine(logits: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Call the reference engine, past the choice that the public function makes."""
    return solve(logits, lower, upper, torch.ones(1, 1))[0].to(logits.dtype)


def judge(rows: Rows, engine: Engine, *, relative: bool = True) -> tuple[float, float]:
    """Hold an engine's answers against 60 digits; return the worst absolute and relative error."""
    logits, lower, upper = (torch.from_numpy(part) for part in rows)
    answer = engine(logits, lower, upper)
    assert ((answer >= lower) & (answer <= upper)).all()
    dtype = rows.logits.dtype.type
    worst_absolute = worst_relative = 0.0
    for row, got in enumerate(answer.numpy()):
        problem = rows.logits[row], rows.lower[row], rows.upper[row]
        exact, free = box_bisection(*problem)
        wanted = np.array([float(p) for p in exact])
        error = np.abs(got.astype(np.float64) - wanted)
        assert error.max() <= ABSOLUTE[dtype], problem
        worst_absolute = max(worst_absolute, float(error.max()))
        if relative:
            counted = np.array(free) & (wanted >= np.finfo(dtype).tiny)
            ratio = float((error[counted] / wanted[counted]).max(initial=0.0))
            assert dtype is np.float64 or ratio <= RELATIVE_WHERE_FREE, problem
            worst_relative = max(worst_relative, ratio)
    return worst_absolute, worst_relative


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("engine", [box_constrained_softmax, torch_engine])
def test_adversarial_rows(engine: Engine, dtype: type[np.floating]) -> None:
    for rows in adversarial_rows(3_000, 11, dtype):
        judge(rows, engine, relative=engine is not torch_engine)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("part", range(10))
def test_a_million_adversarial_rows(part: int, dtype: type[np.floating]) -> None:
    count, errors = 0, []
    for rows in adversarial_rows(100_000, 1_000 + part, dtype):
        errors.append(judge(rows, box_constrained_softmax))
        count += len(rows.logits)
    assert count >= 100_000
    absolute, relative = (max(column) for column in zip(*errors, strict=True))
    found = f"worst error {absolute:.1e}, relative where free {relative:.1e}"
    print(f"{count} rows of {dtype.__name__}: {found}")  # noqa: T201 - for the records


@pytest.mark.long
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("spread", [3.0, 3000.0])
def test_a_hundred_thousand_classes(spread: float, dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(5)
    size = 100_000
    logits = rng.normal(0, spread, (1, size)).astype(dtype)
    lower = rng.uniform(0, 0.5 / size, (1, size)).astype(dtype)
    upper = np.maximum(lower, rng.uniform(0, 4 / size, (1, size)).astype(dtype))
    judge(Rows(logits, lower, upper), box_constrained_softmax)


@pytest.mark.parametrize(("box", "most"), [("vector", 4.0), ("tight", 6.5), ("half", 1.5), ("nowhere", 0.0)])
def test_passes_over_rows_of_a_thousand_classes(box: str, most: float) -> None:
    """Without the logistic steps, 3.5 and 12 passes for the first two."""
    logits, lower, upper = problems(64, 1000)[box]
    assert passes(logits, lower, upper) <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_long_row_of_two_logits(dtype: torch.dtype) -> None:
    """500 classes would have .0015 each and are held at .0012; the other 500 share .4."""
    logits = torch.tensor([0.0, np.log(3)], dtype=dtype).repeat_interleave(500)[None]
    upper = torch.full_like(logits, 0.0012)
    for bound in (upper, 0.0012):
        answer = box_constrained_softmax(logits, 0.0, bound)
        wanted = torch.tensor([0.0008, 0.0012], dtype=dtype).repeat_interleave(500)[None]
        assert torch.allclose(answer, wanted, rtol=16 * torch.finfo(dtype).eps, atol=0)
