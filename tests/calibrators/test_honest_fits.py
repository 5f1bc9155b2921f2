"""The defaults with bad data: they warn, choose nothing harmful, and call no worse calibrator better."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier

from boxcal.calibrators import Calibrator, fit, methods
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.evaluation.report import cross_fitted_report
from boxcal.calibrators.fitting import FitResult, cross_validation, selection
from boxcal.calibrators.fitting.cross_validation import (
    TOLERANCE,
    Comparison,
    paired_errors,
    plainest_of_equals,
    selection_bias,
)
from boxcal.calibrators.fitting.fit_method import fit_checked
from boxcal.calibrators.fitting.fitted_method import Fitted
from boxcal.calibrators.fitting.selection import candidates
from boxcal.calibrators.method import parse
from tests.calibrators.samples import drawn

Floats = NDArray[np.float64]
Set = tuple[Floats, NDArray[np.int64]]


def scores(calibrator: Calibrator | None, logits: Floats, labels: NDArray[np.int64]) -> tuple[float, float]:
    """NLL and Brier score on new data."""
    rows = torch.from_numpy(logits)
    answer = (rows.softmax(dim=1) if calibrator is None else calibrator(rows)).numpy()
    own = answer[np.arange(len(labels)), labels]
    brier = (answer**2).sum(axis=1) - 2 * own + 1
    return float(-np.log(np.maximum(own, 1e-300)).mean()), float(brier.mean())


def serious(result: FitResult) -> set[str]:
    return {warning.code for warning in result.warnings if warning.severity == "serious"}


@pytest.fixture(scope="module")
def forest() -> tuple[Set, Set]:
    """Validation and test set of a random forest: log probabilities, zeros as uploads keep them."""
    inputs, labels = make_classification(
        2500, 20, n_informative=10, n_classes=5, class_sep=1.0, random_state=0
    )
    model = RandomForestClassifier(10, random_state=0).fit(inputs[:1000], labels[:1000])
    smallest = np.finfo(np.float32).tiny
    logits = np.log(np.maximum(model.predict_proba(inputs), smallest))
    return (logits[1000:1600], labels[1000:1600]), (logits[1600:], labels[1600:])


def test_a_forest_with_zeros_is_not_made_worse_by_a_temperature(forest: tuple[Set, Set]) -> None:
    validation, _ = forest
    report = cross_fitted_report("ts", *validation)
    assert report.difference["nll"].value < -1.0
    assert report.difference["brier"].low > 0
    assert not report.is_better
    assert "but Brier score" in report.against.verdict.reason
    assert "smooth ECE" in report.against.verdict.reason
    (zeros,) = (warning for warning in report.warnings if warning.code == "zero_probability")
    rows = np.arange(len(validation[1]))
    assert zeros.rows == (validation[0][rows, validation[1]] < -80).sum()
    assert "give the true class probability 0" in zeros.message


@pytest.mark.parametrize("method", ["ts+pb", "auto"])
def test_a_forest_with_zeros_is_calibrated_by_a_floor(forest: tuple[Set, Set], method: str) -> None:
    validation, test = forest
    result = fit(method, *validation, budget_seconds=1000)
    assert result.method != "ts"
    nll, brier = scores(result.calibrator, *test)
    raw_nll, raw_brier = scores(None, *test)
    assert nll < raw_nll - 1.0
    assert brier < raw_brier + 0.01
    bias = result.choice.get("selection_bias", {})
    report = cross_fitted_report(result.method, *validation, selection_bias=bias)
    if method == "ts+pb":
        assert report.is_better
    else:  # `auto` takes the lowest NLL, a floor alone; where that costs smooth ECE, the gate refuses it
        assert result.method in {"pb-lower", "pb", "ts+pb"}
        assert report.is_better or "smooth ECE" in report.against.verdict.reason


def without(classes: list[int]) -> Set:
    logits, labels = drawn(1000)
    kept = ~np.isin(labels, classes)
    return logits[kept], labels[kept]


@pytest.mark.parametrize(
    ("missing", "code"),
    [([7, 8, 9], "absent_classes"), ([3], "absent_classes"), ([0, *range(2, 10)], "one_class")],
)
def test_missing_classes_are_told_and_do_no_harm(missing: list[int], code: str) -> None:
    result = fit("auto", *without(missing), budget_seconds=10)
    assert code in serious(result)
    assert not parse(result.method).is_per_class
    test = drawn(4000, seed=9)
    assert scores(result.calibrator, *test)[0] < scores(None, *test)[0] + 0.1


def test_a_named_method_with_parameters_per_class_is_told_that_a_class_is_missing() -> None:
    assert {"absent_classes", "no_data_for_class"} <= serious(fit("vector", *without([3])))


@pytest.mark.parametrize("few", [1, 5])
def test_auto_fits_nothing_per_class_where_a_class_has_a_handful_of_labels(few: int) -> None:
    """Rows of three classes are missing, not rarer: the test set has as many of them as of the others."""
    logits, labels = drawn(3000, temperature=1.0)
    logits += np.linspace(-1.0, 1.0, 10)
    rank = np.array([np.count_nonzero(labels[:row] == labels[row]) for row in range(len(labels))])
    kept = (labels > 2) | (rank < few)
    result = fit("auto", logits[kept], labels[kept], budget_seconds=1000)
    assert not parse(result.method).is_per_class
    (warning,) = (one for one in result.warnings if one.code == "rare_classes")
    assert "classes 0, 1, 2 have fewer than 25 samples" in warning.message
    assert fit("vector", logits[kept], labels[kept]).nll < result.nll
    assert parse(fit("auto", logits, labels, budget_seconds=1000).method).is_per_class


def test_copies_do_not_lead_the_choice_astray() -> None:
    logits, labels = drawn(60)
    result = fit("auto", np.tile(logits, (20, 1)), np.tile(labels, 20), budget_seconds=10)
    assert "duplicates" in {one.code for one in result.warnings}
    test = drawn(4000, seed=9)
    assert scores(result.calibrator, *test)[0] < scores(None, *test)[0] + 0.05


@pytest.fixture(scope="module")
def chosen() -> FitResult:
    return fit("auto", *drawn(1000, 4), budget_seconds=1000)


def test_auto_takes_a_temperature_where_that_is_the_truth(chosen: FitResult) -> None:
    assert chosen.method == "ts"


def test_auto_never_takes_a_larger_method_with_a_higher_loss(chosen: FitResult) -> None:
    means = chosen.choice["cross_validated_nll"]
    size = {name: parse(name).num_parameters(4) for name in means}
    assert all(
        means[name] >= means[chosen.method] - TOLERANCE for name in means if size[name] <= size[chosen.method]
    )


def test_auto_explains_its_choice(chosen: FitResult) -> None:
    choice = chosen.choice
    assert choice["chosen"] == chosen.method
    lowest = min(choice["cross_validated_nll"], key=choice["cross_validated_nll"].get)
    assert choice["why"].startswith(f"`{lowest}` has the lowest cross-validated NLL of")
    assert lowest == chosen.method or f"`{chosen.method}` is the plainest within" in choice["why"]
    table: dict[str, dict[str, Any]] = {row["method"]: row for row in choice["candidates"]}
    assert table["ts"]["parameters"] == 1
    assert table["ts"]["nll"] == choice["cross_validated_nll"]["ts"]
    for row in table.values():
        assert (row["nll"] is not None) == (row["status"] == "compared")
        assert row["status"] == "compared" or row["status"].startswith("behind ")


def test_auto_adds_bounds_to_the_best_two_that_are_close(chosen: FitResult) -> None:
    tried = {row["method"] for row in chosen.choice["candidates"]}
    means = chosen.choice["cross_validated_nll"]
    bases = [name for name in means if f"{name}+pb" in methods()]
    best, second = sorted(bases, key=means.__getitem__)[:2]
    assert {f"{best}+pb", f"{second}+pb"} <= tried
    assert len({name.split("+")[0] for name in tried if "+" in name}) == 2


def test_auto_leaves_a_model_unchanged_whose_predictions_are_all_right() -> None:
    logits, labels = drawn(60, 5)
    result = fit("auto", logits, logits.argmax(axis=1))
    assert (labels != logits.argmax(axis=1)).any()
    assert result.method == "uncalibrated"
    assert result.choice["why"].startswith("no predicted label is wrong")
    assert "no_errors" in serious(result)


@pytest.mark.parametrize("seed", range(2))
def test_auto_finds_a_real_improvement(seed: int) -> None:
    logits, labels = drawn(400, 3, temperature=1.0, seed=seed)
    biased = logits + np.array([1.0, -1.0, 0.0])
    assert fit("auto", biased, labels, budget_seconds=1000).method not in ("uncalibrated", "ts")


def test_auto_ends_in_time_with_the_best_so_far() -> None:
    result = fit("auto", *drawn(300), budget_seconds=1e-6)
    assert result.method == "uncalibrated"
    assert {row["status"] for row in result.choice["candidates"]} == {"compared", "no time left"}


def test_auto_has_a_temperature_where_there_is_time_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget ends with the first fit of a method that is not among the quickest."""
    now = [0.0]

    def fit_in_time(name: str, *arguments: Any, **options: Any) -> FitResult:
        if name not in ("uncalibrated", "ts", "vector"):
            now[0] = math.inf
        return fit_checked(name, *arguments, **options)

    monkeypatch.setattr(cross_validation, "fit_checked", fit_in_time)
    monkeypatch.setattr(cross_validation, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(selection, "time", SimpleNamespace(monotonic=lambda: now[0]))
    result = fit("auto", *drawn(300), budget_seconds=1)
    assert result.method == "ts"
    compared = {row["method"] for row in result.choice["candidates"] if row["status"] == "compared"}
    assert compared == {"uncalibrated", "ts", "vector"}


def test_the_bias_of_a_choice_is_what_the_lowest_of_equals_gains() -> None:
    """Of 20 equal candidates the lowest looks better than it is; the correction undoes that on average."""
    apparent, corrected = [], []
    for seed in range(40):
        losses = np.random.default_rng(seed).normal(size=(300, 1, 20)).repeat(2, axis=1)
        means = losses[:, 0].mean(axis=0)
        bias = selection_bias(losses, np.zeros((20, 20)), np.arange(300))
        apparent.append(means.min())
        corrected.append(means.min() + bias["nll"])
    assert np.mean(apparent) < -0.08
    assert abs(np.mean(corrected)) < 0.04


def test_fits_shared_among_methods_are_those_of_each_alone() -> None:
    data, known = check_validation_set(*drawn(200, 3)), dict[str, Fitted]()
    for name in ("pb", "ts", "vector", "ts+pb", "dirichlet+pb"):
        shared = fit_checked(name, data, thorough=False, known=known)
        alone = fit_checked(name, data, thorough=False)
        assert shared.calibrator.to_bytes() == alone.calibrator.to_bytes()


def test_only_a_method_far_behind_on_enough_samples_is_dropped() -> None:
    comparison = Comparison(check_validation_set(*drawn(600)), 0, math.inf, lambda stage: None)
    assert comparison.run("uncalibrated", comparison.first)
    assert comparison.run("ts", comparison.first)
    mean, error = comparison.difference("uncalibrated", "ts", comparison.first)
    assert mean > 3 * error
    assert comparison.is_behind("uncalibrated", "ts", 3.0, comparison.first)
    assert not comparison.is_behind("ts", "uncalibrated", 3.0, comparison.first)
    assert not comparison.is_behind("uncalibrated", "ts", mean / error + 1, comparison.first)
    assert not comparison.run("pb-upper", len(comparison.parts), against="ts", errors=0.0)
    assert 1 <= comparison.computed("pb-upper") < len(comparison.parts)


def test_the_plainest_of_equals_is_never_above_a_plainer_one() -> None:
    means = np.array([0.5, 0.44, 0.45, 0.4])
    equal = np.full((4, 4), TOLERANCE)
    assert plainest_of_equals(means, equal) == 3
    equal[2, 3] = 0.06  # a noisy difference
    assert plainest_of_equals(means, equal) == 3
    equal[1, 3] = 0.06
    assert plainest_of_equals(means, equal) == 1


def test_what_counts_as_equal_depends_on_the_noise_of_the_difference() -> None:
    noise = np.random.default_rng(0).normal(size=(400, 3)) * [1.0, 1.0, 0.0]
    equal = paired_errors(noise + np.array([0.0, 0.0, 1.0]), 2.0)
    assert equal[0, 1] == pytest.approx(2 * math.sqrt(2 / 400), rel=0.1)
    assert equal[0, 2] == pytest.approx(2 * math.sqrt(1 / 400), rel=0.1)
    assert (equal.diagonal() == TOLERANCE).all()


def test_one_candidate_has_no_bias() -> None:
    losses = np.random.default_rng(0).normal(size=(100, 2, 1))
    assert selection_bias(losses, np.zeros((1, 1)), np.arange(100)) == {"nll": 0.0, "brier": 0.0}


@pytest.mark.parametrize(("count", "classes"), [(50, 10), (100, 100)])
def test_no_default_method_does_much_harm_with_few_samples(count: int, classes: int) -> None:
    harm: dict[str, list[float]] = {}
    for seed in range(4):
        validation = drawn(count, classes, temperature=1.0, seed=seed)
        test = drawn(4000, classes, temperature=1.0, seed=seed + 100)
        raw = scores(None, *test)[0]
        for name in candidates(check_validation_set(*validation)):
            if not parse(name).is_network:
                harm.setdefault(name, []).append(scores(fit(name, *validation).calibrator, *test)[0] - raw)
    assert {"uncalibrated", "ts", "pb"} <= harm.keys()
    assert {name: np.mean(values) for name, values in harm.items() if np.mean(values) > 0.05} == {}
