"""`sample_weight`: integer weights are repeated rows, equal weights are none, and weight 0 is absence."""

import numpy as np
import pytest

from boxcal import evaluate, fit
from boxcal.calibrators.evaluation.report import cross_fitted_report
from boxcal.calibrators.row_statistics import effective_samples
from tests.calibrators.samples import sharpened, softmax

ROWS, CLASSES = 400, 4
UNPENALISED = ["ts", "pb", "ts+pb", "lb", "ets", "dpb"]


def drawn(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Give overconfident logits, labels, and integer weights."""
    logits, labels = sharpened(rows, CLASSES, 2.5, seed=3)
    return logits, labels, np.random.default_rng(4).integers(1, 4, rows)


@pytest.mark.parametrize("method", UNPENALISED)
def test_integer_weights_give_the_optimum_of_repeated_rows(method: str) -> None:
    logits, labels, weights = drawn()
    weighted = fit(method, logits, labels, sample_weight=weights)
    repeated = fit(method, np.repeat(logits, weights, axis=0), np.repeat(labels, weights))
    assert weighted.nll == pytest.approx(repeated.nll, abs=1e-8)
    assert weighted.certificate.uncalibrated_nll == pytest.approx(repeated.certificate.uncalibrated_nll)
    assert weighted.nll != pytest.approx(fit(method, logits, labels).nll, abs=1e-4)


@pytest.mark.parametrize("method", ["ts", "pb", "vector", "isotonic", "beta", "venn-abers"])
def test_equal_weights_are_none_and_weight_0_is_absence(method: str) -> None:
    logits, labels, _ = drawn()
    plain = fit(method, logits, labels)
    equal = fit(method, logits, labels, sample_weight=np.full(ROWS, 7.0))
    assert equal.calibrator.to_bytes() == plain.calibrator.to_bytes()
    half = np.arange(ROWS) % 2
    zero = fit(method, logits, labels, sample_weight=half)
    absent = fit(method, logits[half == 1], labels[half == 1])
    assert zero.calibrator.to_bytes() == absent.calibrator.to_bytes()
    tiny = fit(method, logits, labels, sample_weight=np.where(half, 1e308, 1e-308))
    assert tiny.calibrator.to_bytes() == absent.calibrator.to_bytes()


@pytest.mark.parametrize("method", ["ts", "vector", "sms", "pts", "isotonic"])
def test_only_the_ratios_of_weights_matter(method: str) -> None:
    logits, labels, weights = drawn()
    one, other = (fit(method, logits, labels, sample_weight=weights * scale) for scale in (1.0, 0.125))
    assert one.calibrator.to_bytes() == other.calibrator.to_bytes()
    assert fit(method, logits, labels, sample_weight=weights * 1e300).nll == pytest.approx(one.nll, abs=1e-9)


def test_integer_weights_give_the_metrics_of_repeated_rows() -> None:
    logits, labels, weights = drawn()
    shares = softmax(logits)
    weighted = evaluate(shares, labels, sample_weight=weights).to_dict()
    repeated = evaluate(np.repeat(shares, weights, axis=0), np.repeat(labels, weights)).to_dict()
    for name in weighted.keys() - {"samples", "debiased_ece"}:  # whose correction goes by the sample size
        assert weighted[name] == pytest.approx(repeated[name], rel=1e-6), name
    assert weighted["nll"] != pytest.approx(evaluate(shares, labels).nll, rel=1e-3)


def test_the_report_and_the_gate_go_by_the_weights() -> None:
    """Rows of a second kind, which need no calibration, count little: the gate then sees the first."""
    logits, labels, _ = drawn(600)
    honest = logits / 2.5
    both, twice = np.concatenate([logits, honest * 0.4]), np.concatenate([labels, labels])
    weights = np.concatenate([np.ones(600), np.full(600, 1e-3)])
    report = cross_fitted_report("ts", both, twice, sample_weight=weights).to_dict()
    first = cross_fitted_report("ts", logits, labels).to_dict()
    assert report["is_better"]
    assert report["effective_samples"] == pytest.approx(effective_samples(weights))
    for name in ("nll", "brier", "smooth_ece", "ece_width", "error_rate"):
        assert report["metrics"][name]["before"]["value"] == pytest.approx(
            first["metrics"][name]["before"]["value"], rel=0.02
        )
        low, high = (report["metrics"][name]["difference"][end] for end in ("low", "high"))
        assert low <= first["metrics"][name]["difference"]["value"] <= high
    assert "effective_samples" not in first


def test_few_effective_samples_are_told() -> None:
    logits, labels, _ = drawn()
    weights = np.where(np.arange(ROWS) < 6, 1.0, 1e-9)
    warnings = fit("vector", logits, labels, sample_weight=weights).warnings
    assert "effectively 6" in next(one.message for one in warnings if one.code == "few_samples")
