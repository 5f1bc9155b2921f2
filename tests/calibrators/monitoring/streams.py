"""Streams of answers whose law is known, for the tests of the monitor."""

import numpy as np

from tests.calibrators.samples import Array


def answers(random: np.random.Generator, count: int, size: int = 10, scale: float = 4.0) -> Array:
    """Draw rows (N, K) of probabilities like those of a classifier with some confidence."""
    logits = random.normal(size=(count, size))
    logits[np.arange(count), random.integers(0, size, count)] += random.exponential(scale, count)
    return normalised(np.exp(logits))


def shifted(random: np.random.Generator, pool: Array, count: int, factors: Array) -> Array:
    """Draw rows from a pool as they occur where each class is as much more frequent as its factor says."""
    weights = (pool * factors).sum(1)
    rows: Array = pool[random.choice(len(pool), count, p=weights / weights.sum())]
    return rows


def normalised(rows: Array) -> Array:
    result: Array = rows / rows.sum(1, keepdims=True)
    return result


def drawn(law: Array, random: np.random.Generator) -> Array:
    labels: Array = (law.cumsum(1) > random.random((len(law), 1))).argmax(1)
    return labels
