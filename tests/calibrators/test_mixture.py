"""Methods that read a mixture with the uniform distribution, for probabilities of which some are 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from boxcal import Calibrator, fit
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.fitting.selection import candidates
from boxcal.calibrators.scores import as_logits

Array = np.ndarray[Any, Any]


def votes(rows: int = 1500, trees: int = 10, seed: int = 0) -> tuple[Array, Array]:
    """Probabilities of few votes, so that many are 0, also of true classes."""
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(rows, 3))
    powers = np.exp(logits)
    shares = powers / powers.sum(axis=1, keepdims=True)
    labels = np.array([rng.choice(3, p=row) for row in shares])
    return rng.multinomial(trees, shares) / trees, labels


def nll(calibrator: Any, logits: Array, labels: Array) -> float:
    rows = calibrator(torch.from_numpy(logits)).numpy()
    return float(-np.log(rows[np.arange(len(labels)), labels]).mean())


PROBABILITIES, LABELS = votes()
LOGITS, _ = as_logits(PROBABILITIES, "probabilities")


def test_the_map_reads_the_mixture() -> None:
    """With the temperature 2 and the share .1, a probability of 0 of three counts as .1 / 3."""
    stored = fit("mix+ts", LOGITS, LABELS).calibrator
    calibrator = Calibrator("mix+ts", stored.logit_map, stored.bound_map, 3, uniform_share=0.1)
    powers = np.array([0.1 / 3, 0.9 * 0.25 + 0.1 / 3, 0.9 * 0.75 + 0.1 / 3])
    powers = powers ** (1 / stored.spec["parameters"]["temperature"])
    row, _ = as_logits(np.array([[0.0, 0.25, 0.75]]), "probabilities")
    expected = (powers / powers.sum())[None]
    np.testing.assert_allclose(calibrator(torch.from_numpy(row)).numpy(), expected, rtol=1e-12)
    on_arrays = ArrayCalibrator.from_bytes(calibrator.to_bytes())
    np.testing.assert_allclose(on_arrays(row), expected, rtol=1e-12)
    assert on_arrays.spec["parameters"]["uniform_share"] == 0.1
    assert calibrator.adjusted(np.zeros(3)).uniform_share == 0.1


@pytest.mark.parametrize("method", ["ts", "vector", "sms"])
def test_it_is_better_where_true_classes_have_probability_0(method: str) -> None:
    later, truth = votes(seed=1)
    rows, _ = as_logits(later, "probabilities")
    plain, mixed = (fit(name, LOGITS, LABELS) for name in (method, f"mix+{method}"))
    assert mixed.calibrator.uniform_share == 1 / 1501
    assert nll(mixed.calibrator, rows, truth) < nll(plain.calibrator, rows, truth) - 0.05


def test_auto_compares_both_where_there_are_zeros_only() -> None:
    assert {"ts", "mix+ts", "vector", "mix+vector"} <= set(candidates(check_validation_set(LOGITS, LABELS)))
    found = candidates(check_validation_set(np.maximum(LOGITS, -20.0), LABELS))
    assert not [name for name in found if name.startswith("mix+")]


def test_where_nothing_is_gained_nothing_is_mixed() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(500, 3))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    found = fit("mix+ts", logits, labels)
    assert found.nll <= found.certificate.uncalibrated_nll
