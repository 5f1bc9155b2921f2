"""The defaults with bad data: they warn, choose nothing harmful, and call no worse calibrator better."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier

from boxcal.calibrators import Calibrator, fit
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.evaluation.report import cross_fitted_report
from boxcal.calibrators.fitting import FitResult
from boxcal.calibrators.fitting.fit_method import fit_checked
from boxcal.calibrators.fitting.fitted_method import Fitted
from boxcal.calibrators.fitting.selection import candidates
from boxcal.calibrators.maps.stack import component_names
from boxcal.calibrators.method import parse
from tests.calibrators.samples import Floats, Labels, Set, drawn, softmax, variants


def scores(calibrator: Calibrator | None, logits: Floats, labels: Labels) -> tuple[float, float]:
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
    report = cross_fitted_report(result.method, *validation, unseen=result.unseen)
    assert report.is_better or "smooth ECE" in report.against.verdict.reason
    if method == "auto":
        weights = {row["method"]: row["weight"] for row in result.choice["candidates"]}
        assert sum(weights[name] for name in weights if name.startswith("mix+") or name == "ets") > 0.85


def any_per_class(method: str) -> bool:
    return any(parse(name).is_per_class for name in component_names(method) or [method])


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
    assert not any_per_class(result.method)
    test = drawn(4000, seed=9)
    assert scores(result.calibrator, *test)[0] < scores(None, *test)[0] + 0.1


@pytest.mark.parametrize("few", [1, 5])
def test_auto_fits_nothing_per_class_where_a_class_has_a_handful_of_labels(few: int) -> None:
    """Rows of three classes are missing, not rarer: the test set has as many of them as of the others."""
    logits, labels = drawn(3000, temperature=1.0)
    logits += np.linspace(-1.0, 1.0, 10)
    rank = np.array([np.count_nonzero(labels[:row] == labels[row]) for row in range(len(labels))])
    kept = (labels > 2) | (rank < few)
    result = fit("auto", logits[kept], labels[kept], budget_seconds=1000)
    assert not any_per_class(result.method)
    (warning,) = (one for one in result.warnings if one.code == "rare_classes")
    assert "classes 0, 1, 2 have fewer than 25 samples" in warning.message
    assert fit("vector", logits[kept], labels[kept]).nll < result.nll
    assert any_per_class(fit("auto", logits, labels, budget_seconds=1000).method)


def events(count: int, expected: float, rng: np.random.Generator) -> Set:
    """Logits of a model that expects so many times the odds of an event, of which 1,000 rows have six."""
    odds = 1.6 * rng.normal(size=count) - 6.3
    labels = (rng.random(count) < 1.0 / (1.0 + np.exp(-odds))).astype(np.int64)
    return np.stack([np.zeros(count), odds + np.log(expected)], axis=1), labels


@pytest.mark.parametrize(
    ("seed", "few"),
    [
        (5, 2),
        pytest.param(10, 3, marks=pytest.mark.long),
        (0, 5),
        pytest.param(19, 9, marks=pytest.mark.long),
    ],
)
def test_few_events_correct_a_model_that_expects_many(seed: int, few: int) -> None:
    """As one that was trained with as many events as others. The NLL of the true odds is 0.030."""
    rng = np.random.default_rng(seed)
    validation, test = events(800, 55.0, rng), events(50_000, 55.0, rng)
    assert validation[1].sum() == few
    report = cross_fitted_report("auto", *validation)
    assert report.is_better
    result = fit("auto", *validation)
    assert scores(None, *test)[0] > 0.2
    assert scores(result.calibrator, *test)[0] < 0.04


@pytest.mark.long
def test_few_events_hardly_change_a_model_that_expects_them() -> None:
    """One event where five are expected is chance in one of 25 cases, but looks like more: a warning."""
    rng = np.random.default_rng(0)
    test = events(50_000, 1.0, rng)
    costs = []
    for _ in range(10):
        validation = events(800, 1.0, rng)
        report = cross_fitted_report("auto", *validation)
        assert not report.is_better or {one.code for one in report.warnings} >= {"error_rate"}
        cost = scores(fit("auto", *validation).calibrator, *test)[0] - scores(None, *test)[0]
        assert cost < (0.01 if validation[1].sum() == 1 else 0.002)
        costs.append(cost)
    assert np.mean(costs) < 0.0015


def test_a_class_of_twenty_keeps_no_other_class_from_its_parameters() -> None:
    """A factor that only methods with parameters per class find, and a class as rare in what follows."""
    validation, test = biased_with_a_rare_class(2000, seed=1), biased_with_a_rare_class(20_000, seed=2)
    assert (validation[1] == 0).sum() == 20
    result = fit("auto", *validation)
    assert any_per_class(result.method)
    only = fit("ts", *validation).calibrator
    assert scores(result.calibrator, *test)[0] < scores(only, *test)[0] - 0.1


def biased_with_a_rare_class(count: int, *, seed: int) -> Set:
    """Logits biased by class; one sample in a hundred is of the first class."""
    logits, labels = drawn(12 * count, 5, temperature=1.0, seed=seed)
    rank = np.cumsum(labels == 0)
    kept = np.flatnonzero((labels != 0) | (rank <= count // 100))[:count]
    missing = max(0, count // 100 - int((labels[kept] == 0).sum()))
    extra = np.flatnonzero(labels == 0)[-missing:] if missing else np.empty(0, np.int64)
    kept = np.concatenate([kept[: count - missing], extra])
    return logits[kept] + np.linspace(-2.0, 2.0, 5), labels[kept]


@pytest.mark.parametrize("method", ["sms", "vector", "dirichlet", "matrix"])
def test_a_set_without_errors_does_not_make_a_linear_map_infinitely_sharp(method: str) -> None:
    """40 rows of which every predicted label is right, of a model that is right in four of five."""
    logits, labels = drawn(60, 3, temperature=1.0)
    right = np.flatnonzero(logits.argmax(axis=1) == labels)[:40]
    assert len(right) == 40
    result = fit(method, logits[right], labels[right])
    assert result.on_arrays.spec["parameters"]["temperature"] == 1.0
    test = drawn(4000, 3, temperature=1.0, seed=9)
    assert scores(result.calibrator, *test)[0] < scores(None, *test)[0] + 0.3


def test_copies_do_not_lead_the_choice_astray() -> None:
    logits, labels = drawn(60)
    result = fit("auto", np.tile(logits, (20, 1)), np.tile(labels, 20), budget_seconds=10)
    assert "duplicates" in {one.code for one in result.warnings}
    test = drawn(4000, seed=9)
    assert scores(result.calibrator, *test)[0] < scores(None, *test)[0] + 0.05


def test_auto_is_a_temperature_where_that_is_the_truth_and_explains_itself() -> None:
    result = fit("auto", *drawn(1000, 4), budget_seconds=1000)
    choice = result.choice
    means = choice["cross_validated_nll"]
    test = drawn(20_000, 4, seed=9)
    only = fit("ts", *drawn(1000, 4)).calibrator
    assert scores(result.calibrator, *test)[0] < scores(only, *test)[0] + 1e-3
    assert choice["chosen"] == result.method
    assert choice["why"].startswith("a mixture of 0.")
    assert "nats below the unchanged logits on unseen folds" in choice["why"]
    assert means["ts"] - min(means.values()) < 5e-4
    table: dict[str, dict[str, Any]] = {row["method"]: row for row in choice["candidates"]}
    assert table["ts"]["parameters"] == 1
    assert table["ts"]["nll"] == means["ts"]
    assert table.pop("mix+polynomial")["status"] == "worse on the first fold"
    for row in table.values():
        assert row["nll"] is not None
        assert row["status"] == "compared"
        assert row["weight"] == 0.0 or 0.05 <= row["weight"] < 1.0
    assert table["uncalibrated"]["weight"] == 0.0


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
    (warning,) = (one for one in result.warnings if one.code == "budget_exhausted")
    assert "before ts, ets, mix+vector" in warning.message


def test_fits_shared_among_methods_are_those_of_each_alone() -> None:
    data, known = check_validation_set(*drawn(200, 3)), dict[str, Fitted]()
    for name in ("pb", "ts", "vector", "ts+pb", "dirichlet+pb"):
        shared = fit_checked(name, data, thorough=False, known=known)
        alone = fit_checked(name, data, thorough=False)
        assert shared.calibrator.to_bytes() == alone.calibrator.to_bytes()


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
    assert {"uncalibrated", "ts", "mix+ts", "ets"} <= harm.keys()
    assert {name: np.mean(values) for name, values in harm.items() if np.mean(values) > 0.05} == {}


@pytest.mark.long
def test_what_near_copies_do_to_a_fit_is_not_for_the_gate() -> None:
    """The NLL of new rows is worse, and looks better in folds that hold variants of what they judge."""
    logits, labels, sample = variants(999, 10, 3)
    report = cross_fitted_report("auto", logits, labels)
    assert report.is_better
    assert "near_copies" in {one.code for one in report.warnings if one.severity == "serious"}
    new, truth = drawn(5000, 10, seed=9)

    def loss(answers: Floats) -> float:
        return float(-np.log(answers[np.arange(5000), truth]).mean())

    assert loss(fit("auto", logits, labels).on_arrays(new)) > loss(softmax(new)) + 0.5
    assert loss(fit("auto", logits, labels, groups=sample).on_arrays(new)) < loss(softmax(new)) - 0.05
