"""Rows that break careless solvers: extreme and tied logits, bounds that leave hardly any room, or none."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]


class Rows(NamedTuple):
    """Rows of one length, all in the dtype under test; bounds are feasible in exact arithmetic."""

    logits: Floats
    lower: Floats
    upper: Floats


def adversarial_rows(count: int, seed: int, dtype: type[np.floating]) -> Iterator[Rows]:
    """Yield batches that together hold `count` rows or a few more."""
    rng = np.random.default_rng(seed)
    made = 0
    while made < count:
        size = int(
            rng.choice([1, 2, 3, 4, 5, 7, 10, 16, 33], p=[0.02, 0.18, 0.2, 0.2, 0.15, 0.1, 0.08, 0.05, 0.02])
        )
        rows = min(512, count - made)
        if rng.random() < 0.004:
            size, rows = int(rng.choice([100, 257, 1000])), 2
        logits = np.stack([_logits(size, rng) for _ in range(rows)]).astype(dtype)
        bounds = [_bounds(size, rng, dtype) for _ in range(rows)]
        yield Rows(logits, np.stack([a for a, _ in bounds]), np.stack([b for _, b in bounds]))
        made += rows


def _logits(size: int, rng: np.random.Generator) -> Floats:
    kinds: list[Callable[[], Floats]] = [
        lambda: rng.normal(0, 3, size),
        lambda: rng.uniform(-1e4, 1e4, size),
        lambda: rng.integers(-2, 3, size).astype(float),
        lambda: np.full(size, rng.uniform(-1e4, 1e4)),
        lambda: rng.normal(0, 1, size) * 10.0 ** rng.uniform(-8, 3, size),
        lambda: np.where(rng.random(size) < 0.1, 0.0, rng.uniform(-200, -50, size)),
    ]
    kind = rng.integers(7)
    if kind < len(kinds):
        return kinds[kind]()
    logits = rng.normal(0, 5, size)
    logits[rng.random(size) < 0.4] = -np.inf
    logits[rng.integers(size)] = rng.normal()
    return logits


def _bounds(  # noqa: PLR0911 - one kind each
    size: int, rng: np.random.Generator, dtype: type[np.floating]
) -> tuple[Floats, Floats]:
    """Draw a feasible pair; half of the time one that leaves no room, an ulp of room, or pins classes."""
    kind = rng.integers(10)
    zeros, ones = np.zeros(size, dtype), np.ones(size, dtype)
    if kind == 0:
        return zeros, ones
    if kind == 1:
        return (zeros + rng.uniform(0, 1 / size)).astype(dtype), ones
    if kind == 2:
        return zeros, (zeros + min(1.0, rng.uniform(1, 2.5) / size * (1 + 1e-6))).astype(dtype)
    inside = _point(size, rng, dtype)
    if kind == 3:
        return inside, ones if rng.random() < 0.5 else inside
    if kind == 4:
        return zeros, inside
    slack_below = inside * rng.uniform(0, 1, size) * (rng.random(size) < 0.7)
    slack_above = (1 - inside) * rng.uniform(0, 1, size) ** 4 * (rng.random(size) < 0.7)
    if kind == 5:
        slack_below = slack_below * 1e-12
    if kind == 6:
        slack_above = slack_above * 1e-12
    if kind == 7:
        one = rng.integers(size)
        lower, upper = inside.copy(), inside.copy()
        lower[one] = np.nextafter(lower[one], dtype(0))
        upper[one] = np.nextafter(upper[one], dtype(1))
        return lower, upper
    if kind == 8:
        fixed = rng.random(size) < 0.5
        slack_below[fixed] = 0
        slack_above[fixed] = 0
    lower = np.clip((inside - slack_below).astype(dtype), 0, inside)
    upper = np.clip((inside + slack_above).astype(dtype), inside, 1)
    return lower, upper


def _point(size: int, rng: np.random.Generator, dtype: type[np.floating]) -> Floats:
    weights = rng.exponential(1, size) ** rng.choice([1, 4, 12])
    weights[rng.random(size) < 0.15] = 0
    weights[rng.integers(size)] += 1e-3
    return exact_point(weights, int(weights.argmax()), dtype)


def exact_point(weights: Floats, rest: int, dtype: type[np.floating]) -> Floats:
    """Probabilities that add up to 1 exactly: multiples of a power of two; one of them gets what is left."""
    grain = 2.0 ** (22 if dtype is np.float32 else 50)
    units = np.floor(weights / weights.sum() * grain)
    units[rest] += grain - units.sum()
    return np.asarray(units / grain, dtype)
