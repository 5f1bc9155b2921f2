"""Each way of making the operator's life hard by its name, for every number of classes from 1 to 100,000."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from calibrators.operator import box_constrained_softmax
from tests.calibrators.operator.adversary import Floats, Rows
from tests.calibrators.operator.test_exactness import judge
from tests.reference import box_bisection

DTYPES = [np.float32, np.float64]
SIZES = [1, 2, 3, 10, 333, 100_000]
JUDGED = 1000
"""Rows longer than this are held to their bounds and their sum alone: 60 digits take their time."""

HARD_LOGITS = ["ordinary", "ties", "minus infinity", "ten thousand", "all equal"]
HARD_BOUNDS = [
    "none",
    "lower equals upper",
    "lower bounds of sum one",
    "upper bounds of sum one",
    "one ulp of room",
    "zeros",
]


def draw_logits(kind: str, size: int, rng: np.random.Generator) -> Floats:
    logits = rng.normal(0, 3, size)
    if kind == "ties":
        return np.round(logits)
    if kind == "minus infinity":
        return np.where((rng.random(size) < 0.5) & (np.arange(size) > 0), -np.inf, logits)
    if kind == "ten thousand":
        return rng.choice([-1e4, 1e4, 0.0], size) + logits
    return np.zeros(size) if kind == "all equal" else logits


def exact_point(size: int, dtype: type[np.floating], rng: np.random.Generator) -> Floats:
    """Draw probabilities, every fifth of them 0, that add up to 1 exactly: multiples of a power of two."""
    grain = 2.0 ** (23 if dtype is np.float32 else 52)
    weights = rng.exponential(1, size) * (np.arange(size) % 5 != 1)
    units = np.floor(weights / weights.sum() * grain)
    units[0] += grain - units.sum()
    return np.asarray(units / grain, dtype)


def draw_bounds(
    kind: str, size: int, dtype: type[np.floating], rng: np.random.Generator
) -> tuple[Floats, Floats]:
    point = exact_point(size, dtype, rng)
    zeros, ones = np.zeros(size, dtype), np.ones(size, dtype)
    if kind == "lower equals upper":
        held: NDArray[np.bool_] = np.arange(size) % 2 == 1
        return np.where(held, point, 0).astype(dtype), np.where(held, point, 1).astype(dtype)
    if kind == "lower bounds of sum one":
        return point, ones
    if kind == "upper bounds of sum one":
        return zeros, point
    if kind == "one ulp of room":
        lower, upper = point.copy(), point.copy()
        lower[0], upper[0] = np.nextafter(point[0], dtype(0)), min(ones[0], np.nextafter(point[0], dtype(2)))
        return lower, upper
    if kind == "zeros":
        return zeros, np.where(np.arange(size) % 2 == 0, 1, 0).astype(dtype)
    return zeros, ones


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("bounds", HARD_BOUNDS)
@pytest.mark.parametrize("logits", HARD_LOGITS)
def test_bounds_to_the_last_bit_and_sums_of_one(
    logits: str, bounds: str, size: int, dtype: type[np.floating]
) -> None:
    rng = np.random.default_rng(size)
    scores = draw_logits(logits, size, rng).astype(dtype)
    lower, upper = draw_bounds(bounds, size, dtype, rng)
    if size <= JUDGED:
        judge(Rows(scores[None], lower[None], upper[None]), box_constrained_softmax)
    answer = box_constrained_softmax(*(torch.from_numpy(part) for part in (scores, lower, upper))).numpy()
    assert ((answer >= lower) & (answer <= upper)).all()
    assert abs(answer.astype(np.float64).sum() - 1.0) <= (1e-6 if dtype is np.float32 else 1e-12)


def test_upper_bounds_that_exceed_one_by_less_than_its_rounding() -> None:
    """All held at their upper bounds, the classes would have 4e-16 too much: two are free, one next to 0."""
    rows = Rows(
        np.array([[0.23331192, 1061.6255, -9.961542e-05, 77.24846, 0.36021015]], np.float32),
        np.array([[0.0, 0.00021935765, 0.03931856, 0.096543506, 0.8618989]], np.float32),
        np.array([[4.0268177e-16, 0.0007107258, 0.03931856, 0.098071814, 0.8618989]], np.float32),
    )
    judge(rows, box_constrained_softmax)


def test_the_smallest_normal_probabilities_are_kept() -> None:
    """exp(-87.3305) is just above the smallest normal float32, and not 0."""
    logits = np.array([[0.0, -87.3305, -87.3365]], np.float32)
    judge(Rows(logits, np.zeros_like(logits), np.ones_like(logits)), box_constrained_softmax)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.013, 0.7, 1.9, 31.0])
def test_temperatures_cost_no_digits(temperature: float, dtype: type[np.floating]) -> None:
    rng = np.random.default_rng(3)
    logits = (rng.uniform(-87, 0, (60, 9)) * temperature).astype(dtype)
    logits[::7, 0] = -np.inf
    answer = box_constrained_softmax(torch.from_numpy(logits), 0.0, 0.8, temperature=temperature).numpy()
    tolerance = 1e-5 if dtype is np.float32 else 1e-12
    for row, got in zip(logits, answer, strict=True):
        exact, free = box_bisection(row, np.zeros(9, dtype), np.full(9, 0.8, dtype), temperature)
        wanted = np.array([float(p) for p in exact])
        counted = np.array(free) & (wanted >= np.finfo(dtype).tiny)
        assert (np.abs(got - wanted)[counted] <= tolerance * wanted[counted]).all()
