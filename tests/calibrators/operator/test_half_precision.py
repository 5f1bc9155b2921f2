"""Rounding to float16 against NumPy, at every number where the result changes."""

import numpy as np

from boxcal.calibrators.operator.half_precision import LARGEST, round_to_half


def test_every_half_and_every_tie_is_rounded_as_numpy_does() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = np.unique(every[np.isfinite(every)].astype(np.float64))
    ties = (halves[1:] + halves[:-1]) / 2
    beyond = np.array([-0.0, 5e-324, -1e-30, 65519.0, 65520.0, 1e300, -1e9, np.inf, -np.inf])
    numbers = np.concatenate([halves, ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf), beyond])
    found = np.empty((1, len(numbers)), np.int16)
    round_to_half(numbers[None], found)
    expected = np.clip(numbers, -LARGEST, LARGEST).astype(np.float16)
    assert np.array_equal(found[0], expected.view(np.int16))
