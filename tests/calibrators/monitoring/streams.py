"""Streams of answers whose law is known, for the tests of the monitor."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def answers(random: np.random.Generator, count: int, size: int = 10, scale: float = 4.0) -> Array:
    """Draw rows (N, K) of probabilities like those of a classifier with some confidence."""
    logits = random.normal(size=(count, size))
    logits[np.arange(count), random.integers(0, size, count)] += random.exponential(scale, count)
    return normalised(np.exp(logits))


def normalised(rows: Array) -> Array:
    """Scale rows (N, K) to sum to 1."""
    result: Array = rows / rows.sum(1, keepdims=True)
    return result


def drawn(law: Array, random: np.random.Generator) -> Array:
    """Draw one label from each row (N, K)."""
    labels: Array = (law.cumsum(1) > random.random((len(law), 1))).argmax(1)
    return labels
