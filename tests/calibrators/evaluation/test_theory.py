"""The bound on the smooth calibration error of probability bounding: worked by hand, and simulated."""

import math

import numpy as np
import pytest
import torch

from boxcal.calibrators import fit
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.evaluation.report import cross_fitted_report
from boxcal.calibrators.evaluation.theory import post_processing_gap, smooth_calibration_bound


def test_deviation_is_the_theorems_and_falls_with_tighter_bounds_and_more_samples() -> None:
    """Bounds of exactly 1/4 and 3/4 give k = 2 and B = log 3."""
    probability = np.tile([0.25, 0.75], 5000)
    labels = np.tile([0, 0, 0, 1, 1, 1, 0, 1], 1250)
    found = smooth_calibration_bound(probability, labels, 0.25, 0.9, delta=0.1)
    size = math.log(3)
    expected = (42 * size + 144 + (size + 2) * math.sqrt(math.log(16 / 0.1) / 2)) / 100
    assert found.deviation == pytest.approx(expected)
    assert found.bound == pytest.approx(math.sqrt(found.gap / 2 + expected))
    few = smooth_calibration_bound([0.3, 0.7] * 50, [0, 1] * 50, 0.3, 0.7)
    many = smooth_calibration_bound([0.3, 0.7] * 500, [0, 1] * 500, 0.3, 0.7)
    loose = smooth_calibration_bound([0.3, 0.7] * 500, [0, 1] * 500, 0.01, 0.99)
    assert many.deviation < few.deviation
    assert many.deviation < loose.deviation


def test_one_groups_gap_is_its_divergence_and_calibrated_groups_have_none() -> None:
    """All samples at p = .8, of which half are 1: moving the logit to 0 gains KL(.5 || .8)."""
    logit = np.full(10, math.log(4))
    labels = np.tile([0.0, 1.0], 5)
    expected = 0.5 * math.log(0.5 / 0.8) + 0.5 * math.log(0.5 / 0.2)
    assert post_processing_gap(logit, labels) == pytest.approx(expected, abs=1e-9)
    probability = np.repeat([0.25, 0.75], 8)
    labels = np.array([1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0], dtype=float)
    assert post_processing_gap(np.log(probability / (1 - probability)), labels) == pytest.approx(0, abs=1e-9)


def test_updates_are_lipschitz() -> None:
    """Two groups .1 apart in logit and far apart in truth: the slope of 1 is all that may be used."""
    logit = np.repeat([0.0, 0.1], 1000)
    labels = np.concatenate([np.tile([0, 0, 0, 1], 250), np.tile([1, 1, 1, 0], 250)]).astype(float)
    shifts = np.linspace(-1, 1, 4001)
    best = min(
        np.mean(np.logaddexp(0, moved) - labels * moved)
        for moved in (np.repeat([shift, shift + 0.2], 1000) for shift in shifts)
    )
    plain = np.mean(np.logaddexp(0, logit) - labels * logit)
    assert post_processing_gap(logit, labels) == pytest.approx(plain - best, abs=1e-7)


def smooth_calibration_error(probability: np.ndarray, chance: np.ndarray) -> float:
    """Give smCE by its definition, as a linear programme over 1-Lipschitz functions at 200 probabilities."""
    from scipy.optimize import linprog

    mesh = np.linspace(0, 1, 200)
    place = np.abs(probability[:, None] - mesh).argmin(axis=1)
    mass = np.bincount(place, chance - probability, minlength=200) / len(probability)
    steps = np.diff(np.eye(200), axis=0)
    result = linprog(
        -mass, A_ub=np.vstack([steps, -steps]), b_ub=np.full(398, mesh[1]), bounds=[(-1, 1)] * 200
    )
    assert result.fun is not None
    return -float(result.fun)


def test_the_bound_holds_for_fitted_probability_bounding_and_is_in_its_report() -> None:
    rng = np.random.default_rng(0)
    honest = rng.normal(size=4000) * 1.2
    labels = (rng.random(4000) < 1 / (1 + np.exp(-honest))).astype(int)
    logits = np.column_stack([np.zeros(4000), 2.5 * honest])
    calibrator = fit("pb", logits, labels).calibrator
    bounds = calibrator.fitted_bounds
    assert bounds is not None
    probability = calibrator(torch.from_numpy(logits))[:, 1].numpy()
    found = smooth_calibration_bound(probability, labels, *bounds)
    true_error = smooth_calibration_error(probability, 1 / (1 + np.exp(-honest)))
    assert found.gap > 0
    assert true_error**2 <= found.gap / 2  # with 4,000 samples the deviation is not even needed
    assert true_error <= found.bound
    grouped = cross_fitted_report("pb", logits, labels, folds=2, groups=np.arange(4000) // 2).to_dict()
    assert grouped["smooth_calibration_bound"] is None
    for method, expected in (("pb", found.to_dict()), ("ts", None)):
        document = cross_fitted_report(method, logits, labels, folds=2).to_dict()
        assert document["smooth_calibration_bound"] == expected


@pytest.mark.parametrize(
    ("probability", "labels", "lower", "upper", "message"),
    [
        ([0.5, 0.95], [0, 1], 0.1, 0.9, "row 1 has probability 0.95"),
        ([0.5, 0.6], [0, 2], 0.1, 0.9, "row 1 has probability 0.6, label 2"),
        ([0.5, 0.6], [0, 1], 0.0, 1.0, "vacuous"),
        ([0.5], [0, 1], 0.1, 0.9, r"shape \(N,\)"),
    ],
)
def test_refusals(
    probability: list[float], labels: list[int], lower: float, upper: float, message: str
) -> None:
    with pytest.raises(InvalidDataError, match=message):
        smooth_calibration_bound(probability, labels, lower, upper)
