"""The cross-fitted report: on unseen data, as JSON, the gate's question answered, and its first sentence."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from boxcal.calibrators import fit
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.errors import InvalidDataError, MissingDataError
from boxcal.calibrators.evaluation.crossfit import answers_of, answers_on, cross_fit, predicted_labels
from boxcal.calibrators.evaluation.evaluate import _with_true_labels
from boxcal.calibrators.evaluation.outcomes import outcomes
from boxcal.calibrators.evaluation.report import Report, cross_fitted_report
from boxcal.calibrators.evaluation.verdict import sentence
from tests.calibrators.samples import Floats, Labels, sharpened, softmax

METRICS = {
    "error_rate",
    "nll",
    "brier",
    "ece_width",
    "ece_mass",
    "smooth_ece",
    "debiased_ece",
    "mce",
    "ks",
    "classwise_ece",
    "brier_calibration",
    "brier_refinement",
}


def overconfident(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    logits, labels = sharpened(count, 5, 3.0, seed)
    return torch.from_numpy(logits), torch.from_numpy(labels)


@pytest.fixture(scope="module")
def report() -> Report:
    return cross_fitted_report("pb", *overconfident(900), seed=1)


def test_an_overconfident_model_is_found_better_and_bounds_that_bind_are_counted(
    report: Report,
) -> None:
    assert report.is_better
    for metric in ("nll", "ece_width", "ece_mass", "smooth_ece"):
        assert report.difference[metric].high < 0, metric
    assert report.changed_labels == 0
    document = report.to_dict()
    upper, lower = document["bounds"]["upper"], document["bounds"]["lower"]
    assert 0.2 < upper["smallest"] <= upper["mean"] <= upper["largest"] < 1
    answers = report.answers
    at_upper = answers.probabilities.max(axis=1) >= upper["smallest"]
    assert 0 < upper["samples"] <= int(at_upper.sum())
    assert upper["samples"] <= upper["probabilities"]
    assert lower["samples"] <= lower["probabilities"]
    assert lower["mean"] >= 0


def test_the_document_is_json_complete_and_the_same_for_the_same_seed(report: Report) -> None:
    document = report.to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert set(document["metrics"]) == METRICS
    for values in document["metrics"].values():
        for side in ("before", "after"):
            assert values[side]["low"] <= values[side]["value"] <= values[side]["high"]
            assert 0 < values[side]["p_value"] <= 1
        difference = values["after"]["value"] - values["before"]["value"]
        assert values["difference"]["value"] == pytest.approx(difference)
    assert document["against"]["method"] == "uncalibrated"
    assert "uncalibrated" in document["against"]["reason"]
    assert document["class_prior"] == pytest.approx(report.answers.probabilities.mean(0).tolist())
    again = cross_fitted_report("pb", *overconfident(900), seed=1)
    assert again.to_dict() == document


def test_cross_fitted_answers_are_those_of_the_folds_own_fits() -> None:
    logits, labels = overconfident(40)
    left_out = torch.arange(40) == 3
    answers = cross_fit("ts", check_validation_set(logits, labels), folds=40, seed=5)
    alone = fit("ts", logits[~left_out], labels[~left_out], seed=5).calibrator(logits[left_out])
    np.testing.assert_allclose(answers.probabilities[left_out], alone, rtol=1e-12)


def test_an_active_calibrator_is_not_replaced_by_its_equal() -> None:
    logits, labels = overconfident(600)
    active = fit("ts", logits, labels).calibrator
    again = cross_fitted_report("ts", logits, labels, against=active)
    assert not again.is_better
    assert again.to_dict()["against"]["method"] == "ts"
    assert "not significantly lower" in again.to_dict()["against"]["reason"]
    poor = fit("ts", *overconfident(600, seed=9)).calibrator
    poor.logit_map.parameters["temperature"] *= 0.2
    assert cross_fitted_report("ts", logits, labels, against=poor).is_better


def test_progress_rises_to_one_and_may_cancel() -> None:
    seen: list[tuple[float, str]] = []
    cross_fitted_report("ts", *overconfident(100), progress=lambda f, stage: seen.append((f, stage)))
    fractions = [fraction for fraction, _ in seen]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    assert any("fold 3 of 5" in stage for _, stage in seen)

    def cancel(fraction: float, stage: str) -> None:
        if fraction > 0.3:
            raise KeyboardInterrupt(stage)

    with pytest.raises(KeyboardInterrupt):
        cross_fitted_report("ts", *overconfident(100), progress=cancel)


def test_ties_go_to_the_larger_calibrated_logit() -> None:
    logits = np.array([[3.0, 4.0, -3.0], [4.0, 3.0, -3.0]])
    tied = ArrayCalibrator.uncalibrated(3).calibrate(logits, (np.zeros(3), np.full(3, 0.45)))
    assert (tied.probabilities[:, 0] == tied.probabilities[:, 1]).all()
    assert predicted_labels(tied).tolist() == [1, 0]


def test_three_samples_of_three_classes_are_enough() -> None:
    logits = [[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 1.0]]
    assert cross_fitted_report("ts", logits, [0, 2, 1]).to_dict()["folds"] == 3
    with pytest.raises(InvalidDataError, match="at least 3 samples, not N = 2"):
        cross_fitted_report("ts", logits[:2], [0, 2])
    with pytest.raises(InvalidDataError, match="2 to N = 20 folds, not 1"):
        cross_fit("ts", check_validation_set(*overconfident(20)), folds=1)


def test_methods_that_read_features_are_judged_on_features() -> None:
    rng = np.random.default_rng(0)
    features, weight, bias = rng.normal(size=(200, 6)), rng.normal(size=(4, 6)), rng.normal(size=4)
    logits = features @ weight.T + bias
    labels = logits.argmax(axis=1)
    extra: dict[str, Any] = {"features": features, "head": (weight, bias)}
    report = cross_fitted_report("fc", logits, labels, **extra, folds=2)
    assert report.samples == 200
    with pytest.raises(MissingDataError, match="fc"):
        cross_fitted_report("fc", logits, labels)
    calibrator = fit("fc", logits, labels, **extra).calibrator
    data = check_validation_set(logits, labels, **extra)
    expected = answers_of(calibrator, features)
    assert np.array_equal(answers_on(calibrator, data).probabilities, expected.probabilities)


FALLS, RISES, OPEN = (-0.0981, -0.1601, -0.0526), (0.0981, 0.0526, 0.1601), (-0.02, -0.0534, 0.0112)
SAME, INFINITE = (0.0, 0.0, 0.0), (None, None, None)
SERIOUS = [{"code": "error_rate", "severity": "serious", "message": "labels are shifted by one"}]
KNOWN = [{"code": "known_rows", "severity": "serious", "message": "all rows are known"}]
BOTH = SERIOUS + KNOWN


def document(
    nll: tuple[float | None, ...],
    brier: tuple[float | None, ...] = OPEN,
    smooth: tuple[float | None, ...] = OPEN,
    *,
    before: float | None = 0.354,
    after: float | None = 0.2559,
    warnings: list[dict[str, str]] | None = None,
) -> dict[str, Any]:
    names = ("value", "low", "high")
    metrics = {
        name: {"difference": dict(zip(names, one, strict=True))}
        for name, one in {"nll": nll, "brier": brier, "smooth_ece": smooth}.items()
    }
    metrics["nll"] |= {"before": {"value": before}, "after": {"value": after}}
    return {"metrics": metrics, "warnings": warnings or []}


@pytest.mark.parametrize(
    ("said", "report"),
    [
        ("Use it: NLL falls by 0.098 (0.053 to 0.160).", document(FALLS)),
        ("Use it: NLL falls by 0.00040 (0.00010 to 0.00070).", document((-0.0004, -0.0007, -0.0001))),
        ("Do not use it: NLL rises by 0.098 (0.053 to 0.160).", document(RISES)),
        (
            "Do not use it: NLL falls by 0.098 (0.053 to 0.160), "
            "but Brier score rises by 0.012 (0.010 to 0.014).",
            document(FALLS, (0.012, 0.01, 0.014)),
        ),
        ("No clear gain: NLL is not clearly different (-0.053 to +0.011).", document(OPEN)),
        (
            "Use it: smooth ECE falls by 0.098 (0.053 to 0.160), and neither NLL nor Brier score rises.",
            document(OPEN, OPEN, FALLS),
        ),
        (
            "No clear gain: NLL is not clearly different (-0.053 to +0.011).",
            document(OPEN, (0.001, -0.2, 0.2), FALLS),
        ),
        ("No clear gain: NLL does not change.", document(SAME)),
        ("Use it: NLL is no longer infinite.", document(INFINITE, before=None)),
        ("Do not use it: NLL is infinite: a true class has probability 0.", document(INFINITE, after=None)),
        ("Correct the data first: NLL falls by 0.098 (0.053 to 0.160).", document(FALLS, warnings=SERIOUS)),
        ("Correct the data first: NLL falls by 0.098 (0.053 to 0.160).", document(FALLS, warnings=BOTH)),
        ("Judge it on other data: NLL falls by 0.098 (0.053 to 0.160).", document(FALLS, warnings=KNOWN)),
    ],
)
def test_a_report_begins_with_what_to_do(said: str, report: dict[str, Any]) -> None:
    assert sentence(report) == said


def test_a_loss_that_is_no_longer_infinite_has_no_number() -> None:
    """The logits of some labels lie 800 below others: their probabilities are 0."""
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(400, 2)), rng.integers(0, 2, 400)
    logits[np.arange(20), labels[:20]] -= 800.0
    reason = cross_fitted_report("pb", logits, labels).to_dict()["against"]["reason"]
    assert "NLL (no longer infinite) is significantly lower than with `uncalibrated`" in reason
    assert "nan" not in reason


def test_against_an_active_calibrator_the_sentence_names_it() -> None:
    report = document(FALLS)
    differences = {name: one["difference"] for name, one in document(OPEN)["metrics"].items()}
    report["against"] = {
        "method": "ts",
        "metrics": {"nll": {"active": {"value": 0.25}, "difference": differences["nll"]}},
        "joint_intervals": differences,
    }
    assert sentence(report) == "No clear gain: NLL is not clearly different (-0.053 to +0.011) against `ts`."


def with_unrelated_labels(
    temperature: float, share: float, count: int = 800
) -> tuple[Floats, Labels, Floats]:
    """Logits, labels of which a share is drawn at random, and the true probabilities."""
    rng = np.random.default_rng(3)
    logits = 3.0 * rng.normal(size=(count, 10))
    truth = softmax(logits)
    labels = (truth.cumsum(axis=1) < rng.random((count, 1))).sum(axis=1).clip(max=9)
    labels = np.where(rng.random(count) < share, rng.integers(0, 10, count), labels)
    return temperature * logits, labels, truth


@pytest.mark.parametrize(("temperature", "severity"), [(0.4, "warning"), (1.2, "serious"), (3.0, "warning")])
def test_unrelated_labels_that_decide_are_serious(temperature: float, severity: str) -> None:
    logits, labels, _ = with_unrelated_labels(temperature, 0.06)
    report = cross_fitted_report("ts", logits, labels)
    assert report.is_better
    (found,) = [one for one in report.warnings if one.code == "unrelated_labels"]
    assert found.severity == severity
    assert ("better than those of `uncalibrated` all the same" in found.message) is (severity == "warning")


def test_outcomes_without_unrelated_labels_are_estimated_without_bias() -> None:
    logits, labels, truth = with_unrelated_labels(1.5, 0.2, 40_000)
    scored = outcomes(softmax(logits), labels)
    found = _with_true_labels(scored, 0.2)
    p = softmax(logits)
    expected = {
        "nll": -(truth * np.log(p)).sum(axis=1),
        "brier": ((p - truth) ** 2).sum(axis=1) + (truth * (1 - truth)).sum(axis=1),
        "correct": truth[np.arange(len(p)), scored.predicted],
    }
    for name, values in expected.items():
        error = getattr(found, name) - values
        assert abs(error.mean()) < 4 * error.std() / np.sqrt(len(error)), name
        assert abs((getattr(scored, name) - values).mean()) > 10 * error.std() / np.sqrt(len(error)), name
