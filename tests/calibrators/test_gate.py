"""How often the gate activates a fit, by simulation."""

import numpy as np
import pytest

from boxcal.calibrators.evaluation.report import cross_fitted_report
from tests.calibrators.samples import Set, drawn

pytestmark = pytest.mark.long

ZERO = np.log(np.finfo(np.float32).tiny)


def draw(count: int, classes: int, temperature: float, zeros: float, seed: int) -> Set:
    """Draw logits that are `temperature` times too large, a share of whose true classes has probability 0."""
    logits, labels = drawn(count, classes, temperature=temperature, seed=seed)
    lost = np.random.default_rng([seed, 1]).random(count) < zeros
    logits[lost, labels[lost]] = ZERO
    return logits, labels


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("temperature", "zeros", "least", "most"),
    [(1.0, 0.0, 0, 1), (1.5, 0.0, 14, 15), (1.0, 0.02, 0, 1)],
    ids=["calibrated", "overconfident", "zeros"],
)
def test_the_gate_activates_what_is_better_and_nothing_else(
    temperature: float, zeros: float, least: int, most: int
) -> None:
    """Of 15 sets; `ts` answers zeros with a temperature that harms Brier score and smooth ECE."""
    activated = sum(
        cross_fitted_report("ts", *draw(300, 10, temperature, zeros, seed)).is_better for seed in range(15)
    )
    assert least <= activated <= most
