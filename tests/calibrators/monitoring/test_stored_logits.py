"""Logits in the feedback log: what is read back gives the probabilities that were served."""

import numpy as np
import pytest
from numpy.typing import NDArray

from boxcal.calibrators.monitoring.stored_logits import pack, unpack


def softmax(logits: NDArray[np.float64], temperature: float = 1.0) -> NDArray[np.float64]:
    powers = np.exp((logits - logits.max(1, keepdims=True)) / temperature)
    answers: NDArray[np.float64] = powers / powers.sum(1, keepdims=True)
    return answers


def test_every_half_and_every_tie_is_rounded_as_numpy_does() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = np.unique(every[np.isfinite(every)].astype(np.float64))
    ties = (halves[1:] + halves[:-1]) / 2
    below = np.concatenate([halves, ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf), [-1e-30]])
    numbers = below[(below <= 0) & (below >= -65504)][:, None]
    found = unpack(pack(np.hstack([np.zeros_like(numbers), numbers])))
    assert np.array_equal(found[:, 0], np.zeros(len(numbers)))
    assert np.array_equal(found[:, 1], numbers[:, 0].astype(np.float16).astype(np.float64))


@pytest.mark.parametrize("size", [2, 10, 1000])
@pytest.mark.parametrize("offset", [0.0, -3e3, 3e3, 6e3, 7e4, -1e6, 1e6])
def test_probabilities_are_those_that_were_served_whatever_the_offset(size: int, offset: float) -> None:
    logits = 3.0 * np.random.default_rng(0).normal(size=(500, size)) + offset
    found = unpack(pack(logits))
    assert np.abs(softmax(found) - softmax(logits)).max() < 0.001
    assert np.abs(found - logits).max() < 0.02


@pytest.mark.parametrize(("spread", "temperature"), [(1e5, 1.0), (1e5, 3e4), (1e9, 3e8), (1e-3, 1e-3)])
def test_rows_wider_than_float16_keep_their_probabilities(spread: float, temperature: float) -> None:
    logits = spread * np.random.default_rng(1).normal(size=(500, 10)) - spread
    served = softmax(logits, temperature)
    assert np.abs(softmax(unpack(pack(logits)), temperature) - served).max() < 0.001


def test_extreme_logits_stay_finite_and_in_their_order() -> None:
    found = unpack(pack(np.array([[1e300, 0.0, -1e300], [-1e300, -1e300, -np.inf], [5.0, 5.0, 5.0]])))
    assert np.isfinite(found).all()
    assert found[0].argmax() == 0
    assert found[0].argmin() == 2
    assert np.array_equal(found[2], [5.0, 5.0, 5.0])
