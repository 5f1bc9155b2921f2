"""Metrics against hand-worked cases, scikit-learn and relplot."""

import json

import numpy as np
import pytest
import relplot
import torch
from sklearn.metrics import brier_score_loss, log_loss

from boxcal.calibrators import evaluate
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.evaluation import brier, error_rate, expected_calibration_error, nll, smooth_ece
from boxcal.calibrators.evaluation.outcomes import outcomes
from boxcal.calibrators.evaluation.smooth import SMALLEST_BANDWIDTH, Confidences, SmoothedResiduals
from boxcal.calibrators.evaluation.toplabel import DebiasedError
from tests.calibrators.samples import softmax

RNG = np.random.default_rng(0)


def random_case(count: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    probabilities = softmax(2 * RNG.normal(size=(count, classes)))
    return probabilities, RNG.integers(0, classes, count)


def test_certainty_is_perfect_where_right_and_as_bad_as_can_be_where_wrong() -> None:
    found = evaluate(np.eye(3)[[0, 1, 2, 0]], [0, 1, 2, 0]).to_dict()
    assert found.pop("samples") == 4
    assert found == dict.fromkeys(found, pytest.approx(0.0, abs=1e-12))
    found = evaluate(np.eye(2)[[0, 0, 1]], [1, 1, 0])
    assert (found.error_rate, found.brier) == (1.0, 2.0)
    assert (found.ece_width, found.ece_mass, found.mce, found.ks) == (1.0, 1.0, 1.0, 1.0)
    assert found.nll == np.inf
    assert found.to_dict()["nll"] is None
    json.dumps(found.to_dict(), allow_nan=False)


def test_hand_worked_cases() -> None:
    probabilities = np.array([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.45, 0.55]])
    labels = [0, 1, 1, 1]
    found = evaluate(probabilities, labels)
    assert found.error_rate == 0.25
    assert found.nll == pytest.approx(-np.log([0.9, 0.2, 0.7, 0.55]).mean())
    assert found.brier == pytest.approx(2 * (0.1**2 + 0.8**2 + 0.3**2 + 0.45**2) / 4)
    # four samples, four bins: each gap counts a quarter
    assert found.ece_width == pytest.approx((0.1 + 0.8 + 0.3 + 0.45) / 4)
    assert found.mce == pytest.approx(0.8)
    # cumulative residuals by confidence: -.45, -.75, +.05, -.05
    assert found.ks == pytest.approx(0.75 / 4)
    # classes mirror each other in two-class problems
    assert found.classwise_ece == pytest.approx((0.1 + 0.8 + 0.3 + 0.45) / 4)
    assert found.brier_calibration == pytest.approx(found.brier)
    assert found.brier_refinement == pytest.approx(0.0)
    # confidence of 1 falls into the last bin of ten: mean confidence .975, accuracy .5
    assert expected_calibration_error([[0.05, 0.95], [0.0, 1.0]], [1, 0], bins=10) == pytest.approx(0.475)
    assert error_rate([[0.4, 0.4, 0.2]], [1]) == 1.0
    assert error_rate([[0.4, 0.4, 0.2]], [1], predicted=[1]) == 0.0


def test_classwise_ece_is_the_mean_of_each_classs_own() -> None:
    probabilities, labels = random_case(400, 4)
    expected = []
    for k in range(4):
        of_class = probabilities[:, k]
        index = np.ceil(of_class * 15).astype(int)
        gaps = [(of_class - (labels == k))[index == m].sum() for m in range(16)]
        expected.append(np.abs(gaps).sum() / 400)
    assert evaluate(probabilities, labels).classwise_ece == pytest.approx(np.mean(expected))


def test_equal_mass_bins_hold_equal_counts_and_never_split_equal_confidences() -> None:
    confidence = np.linspace(0.51, 0.995, 45)
    labels = np.arange(45) % 2
    probabilities = np.column_stack([1 - confidence, confidence])
    threes = (confidence - labels).reshape(15, 3).sum(axis=1)
    assert expected_calibration_error(probabilities, labels, binning="mass") == pytest.approx(
        np.abs(threes).sum() / 45
    )
    tied = np.tile([0.25, 0.75], (40, 1))
    half = np.arange(40) >= 10  # the order of samples must not matter: accuracy .75 at confidence .75
    assert expected_calibration_error(tied, half.astype(int), binning="mass") == pytest.approx(0.0)


def test_debiased_error_has_no_bias_where_ece_has() -> None:
    rng = np.random.default_rng(3)
    squares, plain = [], []
    for _ in range(300):
        confidence = 0.5 + 0.5 * rng.random(600)
        labels = (rng.random(600) < confidence).astype(int)
        scored = outcomes(np.column_stack([1 - confidence, confidence]), labels)
        root = DebiasedError(scored).statistic
        squares.append(np.sign(root) * root**2)
        plain.append(evaluate(np.column_stack([1 - confidence, confidence]), labels).ece_mass)
    assert np.mean(plain) > 0.03
    assert abs(np.mean(squares)) < 4 * np.std(squares) / np.sqrt(300)


@pytest.mark.parametrize("count", [1, 2, 17, 500, 20_000])
def test_smooth_ece_equals_relplots(count: int) -> None:
    rng = np.random.default_rng(count)
    wide = 0.5 + 0.5 * rng.random(count)
    sure = 0.5 + 0.5 * rng.beta(40, 0.3, count)
    for confidence in (wide, sure, np.minimum(sure, 0.9), np.round(wide, 1), np.ones(count)):
        for accuracy in (confidence, confidence**3, np.zeros(count)):
            labels = (rng.random(count) < accuracy).astype(int)
            probabilities = np.column_stack([1 - confidence, confidence])
            expected = relplot.smECE(confidence, labels.astype(float))
            found = smooth_ece(probabilities, labels, np.ones(count, int))
            assert found == pytest.approx(expected, abs=1e-12)


def bisected(smoothed: SmoothedResiduals, sets: int) -> np.ndarray:
    """The error at the bandwidth that ten bisections of [0, 1] find, without a bracket."""
    high, low, rows = np.ones(sets), np.zeros(sets), np.arange(sets)
    for _ in range(10):
        middle = (high + low) / 2
        below = (middle < SMALLEST_BANDWIDTH) | (middle < smoothed.errors(middle, rows))
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return smoothed.errors(high, rows)


def test_the_bracket_of_the_bandwidth_holds_where_the_error_rises_with_it() -> None:
    rng = np.random.default_rng(1)
    for count in rng.integers(1, 80, 30):
        confidence = rng.choice([rng.random(count), np.round(rng.random(count), 1)][count % 2], count)
        accuracy = (confidence, confidence**3, 0 * confidence, 1 - confidence)[int(rng.integers(4))]
        residuals = confidence[:, None] - (rng.random((count, 40)) < accuracy[:, None])
        smoothed = SmoothedResiduals(Confidences(confidence), residuals)
        np.testing.assert_allclose(smoothed.fixed_points()[0], bisected(smoothed, 40), atol=1e-12)


def test_metrics_agree_with_scikit_learn_and_the_brier_parts_add_up() -> None:
    probabilities, labels = random_case(1000, 7)
    assert nll(probabilities, labels) == pytest.approx(log_loss(labels, probabilities, labels=range(7)))
    assert brier(probabilities, labels) == pytest.approx(
        brier_score_loss(labels, probabilities, labels=range(7), scale_by_half=False)
    )
    assert error_rate(probabilities, labels) == (probabilities.argmax(axis=1) != labels).mean()
    found = evaluate(probabilities, labels)
    assert found.brier_calibration + found.brier_refinement == pytest.approx(found.brier)
    assert found.brier_calibration > 0


def test_takes_tensors_of_any_floating_dtype() -> None:
    probabilities, labels = random_case(300, 6)
    exact = evaluate(probabilities, labels).to_dict()
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        found = evaluate(torch.from_numpy(probabilities).to(dtype), torch.from_numpy(labels)).to_dict()
        assert found == pytest.approx(exact, abs=0.03)


@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        ([[2.5, -1.5], [0.5, 0.5]], [0, 1], r"row 0, class 0 is 2.5 \(logits need a softmax first\)"),
        ([[0.5, 0.5], [0.5, 0.4]], [0, 1], "row 1 sums to 0.9"),
        ([[0.5, 0.5], [float("nan"), 0.4]], [0, 1], "row 1, class 0 is nan"),
        ([[0.5, 0.5]], [2], "row 0 is 2"),
        ([[0.5, 0.5]], [0, 1], "2 labels"),
        ([0.5, 0.5], [0, 1], r"shape \(N, K\)"),
        (np.zeros((0, 3)), [], "^probabilities holds no row$"),
    ],
)
def test_refuses_what_are_not_probabilities(probabilities: object, labels: object, message: str) -> None:
    with pytest.raises(InvalidDataError, match=message):
        evaluate(probabilities, labels)
    with pytest.raises(ValueError, match="'heavy'"):
        expected_calibration_error([[0.5, 0.5]], [0], binning="heavy")  # type: ignore[arg-type]
