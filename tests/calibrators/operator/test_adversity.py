"""Each way of making the operator's life hard by its name, for every number of classes from 1 to 100,000."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from boxcal.calibrators.operator import box_constrained_softmax
from tests.calibrators.operator.adversary import Floats, Rows, exact_point
from tests.calibrators.operator.test_exactness import Engine, judge, torch_engine
from tests.reference import box_bisection, filled_in_order

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


def draw_bounds(
    kind: str, size: int, dtype: type[np.floating], rng: np.random.Generator
) -> tuple[Floats, Floats]:
    point = exact_point(rng.exponential(1, size) * (np.arange(size) % 5 != 1), 0, dtype)
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
        judge_one(scores, lower, upper, dtype)
    answer = box_constrained_softmax(*(torch.from_numpy(part) for part in (scores, lower, upper))).numpy()
    assert ((answer >= lower) & (answer <= upper)).all()
    assert abs(answer.astype(np.float64).sum() - 1.0) <= (1e-6 if dtype is np.float32 else 1e-12)


def judge_one(logits: Any, lower: Any, upper: Any, dtype: type[np.floating] = np.float32) -> None:
    judge(Rows(*(np.array([part], dtype) for part in (logits, lower, upper))), box_constrained_softmax)


def test_upper_bounds_that_exceed_one_by_less_than_its_rounding() -> None:
    """All held at their upper bounds, the classes would have 4e-16 too much: two are free, one next to 0."""
    judge_one(
        [0.23331192, 1061.6255, -9.961542e-05, 77.24846, 0.36021015],
        [0.0, 0.00021935765, 0.03931856, 0.096543506, 0.8618989],
        [4.0268177e-16, 0.0007107258, 0.03931856, 0.098071814, 0.8618989],
    )


def test_bounds_that_add_up_to_one_beside_a_class_of_almost_no_mass() -> None:
    """That the second class has 3e-29 is known only once the fourth is found that much below its bound."""
    judge_one(
        [0.0, -61.59744644165039, -192.9953155517578, 0.0],
        [0.10350298881530762, 0.0, 0.8806183338165283, 0.015218148939311504],
        [0.1670096069574356, 0.24543504416942596, 0.9738472, 0.015878677368164062],
    )


def test_a_class_within_an_ulp_of_its_bound_that_outweighs_the_free_one() -> None:
    """Whether the second class is held decides whether the last one has 2.4e-7 or its lower bound."""
    judge_one(
        [-158.22266, -132.95218, -183.32794, -106.34288, -156.97809],
        [0, 0.1666102111339569, 0.0039746761322021484, 0.0002052122, 2.1726517e-07],
        [0, 0.9954996109008789, 0.0039746761322021484, 0.00052547455, 0.6323534],
    )


def test_free_classes_whose_weights_have_lost_their_digits() -> None:
    """Relative to the largest logit, which is held, the weights of the others are 9e-43 and 6e-59."""
    logits = [-162.1208953857422, -65.26127624511719, -102.67228698730469]
    judge_one(logits, [0, 0, 0], [0.6943408250808716] * 3)


def test_the_smallest_normal_probabilities_are_kept() -> None:
    """exp(-87.3305) is just above the smallest normal float32, and not 0."""
    judge_one([0.0, -87.3305, -87.3365], [0, 0, 0], [1, 1, 1])


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


def uniform_engine(logits: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Give the CPU engine the same bounds as two numbers, which have loops of their own."""
    return box_constrained_softmax(logits, lower.flatten()[0].item(), upper.flatten()[0].item())


ENGINES = [box_constrained_softmax, uniform_engine, torch_engine]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("size", "dtype"),
    [(size, np.float64) for size in (1e6, 1e9, 1e12, 1e15, 1e16, 1e20, 1e100, 1e300, 5e307)]
    + [(size, np.float32) for size in (1e6, 1e9, 1e12, 1e30, 1e38)],
)
def test_finite_logits_of_any_size(size: float, dtype: type[np.floating], engine: Engine) -> None:
    rng = np.random.default_rng(8)
    logits = np.clip(rng.normal(size=(200, 20)), -3, 3).astype(dtype) * dtype(size)
    lower, upper = np.full_like(logits, 0.01), np.full_like(logits, 0.4)
    answer = engine(*(torch.from_numpy(part) for part in (logits, lower, upper))).numpy()
    for row, got, low, high in zip(logits, answer, lower, upper, strict=True):
        gap = np.diff(np.sort(row / 2)).min() * 2
        if gap > 1000:
            wanted = filled_in_order(row, low, high)
            assert np.abs(got - wanted).max() <= (1e-7 if dtype is np.float32 else 1e-15)
    total = answer.astype(np.float64).sum(-1)
    assert np.abs(total - 1).max() <= (1e-6 if dtype is np.float32 else 1e-14)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("size", [1e4, 1e6, 1e16, 1e38, 1e300, 1.7e308])
def test_huge_logits_cost_the_others_no_digits(size: float, engine: Engine) -> None:
    """What the largest class may not have goes to 0.5, 0.25 and -0.125 in the ratio of their exponentials."""
    near = np.array([0.5, 0.25, -0.125])
    wanted = np.array([0.4, *(0.6 * np.exp(near) / np.exp(near).sum()), 0, 0])
    for dtype, tolerance in ((np.float32, 3e-8), (np.float64, 1e-15)):
        if size <= float(np.finfo(dtype).max):
            logits = torch.from_numpy(np.array([[size, *near, -size, -size / 2]], dtype))
            answer = engine(logits, torch.zeros_like(logits), torch.full_like(logits, 0.4)).numpy()[0]
            assert np.abs(answer - wanted).max() <= tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1e-300, 1e-100, 1e-31, 1e-20, 1e20, 1e31, 1e36, 1e100, 1e300])
def test_temperatures_of_any_size(temperature: float, dtype: type[np.floating]) -> None:
    """Logits and temperature may be scaled together."""
    pattern = np.array([[1000, 0.5, 0.25, -1000, -0.125]])
    largest = np.finfo(dtype).max
    logits = np.clip(pattern * temperature, -largest, largest).astype(dtype)
    wanted = box_constrained_softmax(torch.from_numpy(logits.astype(np.float64) / temperature), 0.01, 0.4)
    for bound in (0.4, torch.full((1, 5), 0.4, dtype=torch.from_numpy(logits).dtype)):
        answer = box_constrained_softmax(torch.from_numpy(logits), 0.01, bound, temperature=temperature)
        assert np.allclose(answer, wanted, rtol=0, atol=3e-8 if dtype is np.float32 else 1e-14)


def test_the_temperature_feels_classes_far_below_the_largest() -> None:
    """The free classes are those of 0.5 and 0.25; the one of 1e17 is held and does not matter."""
    slopes = []
    for largest in (1e3, 1e17):
        logits = torch.tensor([[largest, 0.5, 0.25]], dtype=torch.float64)
        temperature = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
        answer = box_constrained_softmax(logits, 0.0, 0.4, temperature=temperature)
        slopes.append(torch.autograd.grad(answer[0, 1], temperature)[0].item())
    share = 1 / (1 + np.exp(-0.25))
    assert slopes == pytest.approx([-0.25 * 0.6 * share * (1 - share)] * 2, rel=1e-12)
