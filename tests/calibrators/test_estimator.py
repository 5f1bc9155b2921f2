"""The estimators keep scikit-learn's conventions, and give what `fit` gives."""

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.ensemble import BaggingClassifier, StackingClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, cross_val_predict, cross_val_score
from sklearn.multiclass import OneVsRestClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.svm import SVC, LinearSVC
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator

from boxcal import BoxCalibratedClassifier, BoxCalibrator, fit
from boxcal.calibrators.data import label_indices
from boxcal.calibrators.errors import InvalidDataError, ValidationDataWarning

CLASSES = np.array(["cat", "dog", "emu"])
SQUARE = "a score of each class is required, and the check's data have other columns"
TOO_FEW_COLUMNS = [  # 2 columns for 3 classes
    "check_classifiers_classes",
    "check_classifiers_train",
    "check_estimators_fit_returns_self",
    "check_estimators_overwrite_params",
    "check_readonly_memmap_input",
]
TOO_MANY_COLUMNS = {  # these columns for fewer classes: they pass where `classes` names as many
    3: {"check_estimators_nan_inf", "check_estimators_pickle", "check_pipeline_consistency"},
    4: {"check_n_features_in_after_fitting", "check_positive_only_tag_during_fit"},
    5: {"check_estimators_dtypes"},
    10: {"check_dtype_object"},
    20: {"check_all_zero_sample_weights_error"},
    30: {"check_sample_weight_equivalence_on_dense_data"},
}


def data(count: int = 300) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 3, count)
    logits = rng.normal(size=(count, 3))
    logits[np.arange(count), labels] += 1.0
    return 4 * logits, labels


def test_bounds_hold_and_ties_go_to_the_larger_logit() -> None:
    logits, labels = data()
    bounded = BoxCalibrator(method="ts", lower=[0.05, 0.0, 0.0], upper=0.4).fit(logits, labels)
    probabilities = bounded.predict_proba(logits)
    assert probabilities.max() <= 0.4
    assert probabilities[:, 0].min() >= 0.05
    np.testing.assert_array_equal(bounded.predict(logits), logits.argmax(axis=1))
    with pytest.raises(ValueError, match="add up"):
        BoxCalibrator(method="ts", upper=0.1).fit(logits, labels)
    with pytest.raises(
        ValueError, match=r"upper has shape \(2,\); it is a number, or one for each of 3 classes"
    ):
        BoxCalibrator(method="ts", upper=[0.9, 0.8]).fit(logits, labels)


def test_classes_give_the_order_of_the_columns() -> None:
    logits, labels = data()
    few = labels > 0
    estimator = BoxCalibrator(method="ts", classes=CLASSES[::-1])
    with pytest.warns(ValidationDataWarning, match="absent_classes: class 'emu'"):
        estimator.fit(logits[few], CLASSES[::-1][labels[few]])
    assert list(estimator.classes_) == list(CLASSES[::-1])
    assert estimator.score(logits, CLASSES[::-1][labels]) > 0.5
    with pytest.raises(ValueError, match=r"= 3 columns, but there are 2 classes in y; give all"):
        BoxCalibrator(method="ts").fit(logits[few], labels[few])
    more = np.where(np.arange(len(labels)) < 5, "fox", CLASSES[labels])
    with pytest.raises(ValueError, match=r"= 3 columns, but there are 4 classes in y: .*fox"):
        BoxCalibrator(method="ts").fit(logits, more)
    with pytest.raises(ValueError, match="`classes` names cat twice"):
        BoxCalibrator(method="ts", classes=["cat", "dog", "cat"]).fit(logits, CLASSES[labels])
    with pytest.raises(ValueError, match="is fox, which is none of"):
        BoxCalibrator(method="ts", classes=CLASSES).fit(logits, np.where(labels, "fox", "cat"))


def test_it_is_the_last_step_of_a_pipeline() -> None:
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(600, 5))
    y = CLASSES[np.digitize(rows[:, 0] + rng.normal(size=600), [-0.5, 0.5])]
    trained = LogisticRegression().fit(rows[:200], y[:200])
    pipeline = make_pipeline(
        FunctionTransformer(trained.decision_function), BoxCalibrator(method="ts", upper=0.8)
    )
    pipeline.fit(rows[200:], y[200:])
    assert pipeline.predict_proba(rows).max() <= 0.8
    assert pipeline.score(rows, y) > 0.4
    assert len(cross_val_score(pipeline, rows[200:], y[200:], cv=3)) == 3
    search = GridSearchCV(
        pipeline, {"boxcalibrator__method": ["uncalibrated", "ts"]}, scoring="neg_log_loss", cv=3
    )
    assert search.fit(rows[200:], y[200:]).best_params_["boxcalibrator__method"] in {"uncalibrated", "ts"}
    assert clone(pipeline).get_params()["boxcalibrator__upper"] == 0.8


def test_probabilities_are_neither_fitted_nor_predicted_as_logits() -> None:
    logits, labels = data()
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    with pytest.raises(ValueError, match=r'Set scores="percent"\.$'):
        BoxCalibrator(method="ts", scores="probabilities").fit(100 * probabilities, labels)
    ours = BoxCalibrator(method="ts", scores="probabilities").fit(probabilities, labels)
    calibrator = BoxCalibrator(method="ts").fit(logits, labels)
    expected = calibrator.predict_proba(logits)
    np.testing.assert_allclose(ours.predict_proba(probabilities), expected, rtol=1e-6)
    assert np.isfinite(ours.predict_proba([[0.0, 0.0, 1.0]])).all()
    with pytest.raises(ValueError, match=r"probabilities\[1\] sums to 1.5; the probabilities of a sample"):
        ours.predict_proba([[0.0, 0.0, 1.0], [0.5, 0.5, 0.5]])
    with pytest.raises(ValueError, match="'odds'"):
        BoxCalibrator(method="ts", scores="odds").fit(logits, labels)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"look like probabilities.* was fitted to logits"):
        calibrator.predict_proba(probabilities)
    assert calibrator.predict_proba(probabilities[:7]).shape == (7, 3)  # by chance
    declared = BoxCalibrator(method="ts", scores="logits").fit(logits, labels)
    assert declared.predict_proba(probabilities).shape == probabilities.shape


def test_bounds_by_name_are_those_of_the_named_classes() -> None:
    logits, labels = data()
    names = np.array(["a", "b", "c"])[labels]

    def largest(upper: Any) -> list[float]:
        fitted = BoxCalibrator(method="ts", upper=upper).fit(logits, names)
        return [float(one) for one in fitted.predict_proba(logits).max(axis=0)]

    expected = [1.0, 0.5, 0.75]
    for upper in ({"c": 0.75, "b": 0.5}, pd.Series({"c": 0.75, "b": 0.5, "a": 1.0})):
        assert largest(upper)[1:] == expected[1:]
    assert largest(pd.Series(expected)) == largest(expected)
    assert largest({}) == largest(None)
    lower = BoxCalibrator(method="ts", lower={"b": 0.25}).fit(logits, names).predict_proba(logits).min(0)
    assert lower[1] == 0.25 > lower[0]
    with pytest.raises(ValueError, match=r"upper names 'd', which is none of the classes \['a', 'b', 'c'\]"):
        largest({"d": 0.5})


@pytest.mark.parametrize("model", [BoxCalibrator("ts"), BoxCalibratedClassifier(LogisticRegression(), "ts")])
def test_a_missing_label_is_named(model: Any) -> None:
    logits, labels = data()
    for missing in (None, pd.NA, pd.NaT):
        names = np.array(["a", "b", "c"], object)[labels]
        names[7] = missing
        with pytest.raises(ValueError, match=r"y\[7\] is missing"):
            model.fit(logits, names)
    texts = pd.Series(names, dtype="string")
    with pytest.raises(ValueError, match=r"y\[7\] is missing: <NA>"):
        model.fit(logits, texts)


def test_scores_of_pairs_of_classes_are_refused() -> None:
    """Of three classes there are three pairs, whose columns could pass for those of the classes."""
    pairs = SVC(decision_function_shape="ovo")
    frozen = FrozenEstimator(clone(pairs).fit(*samples(3)))
    two_steps = make_pipeline(FunctionTransformer(), pairs)
    for model in (pairs, two_steps, frozen, FrozenEstimator(two_steps.fit(*samples(3)))):
        with pytest.raises(ValueError, match=r"SVC has decision_function_shape='ovo': a score for each pair"):
            BoxCalibratedClassifier(model, "ts").fit(*samples(3))
    for model in (
        GridSearchCV(pairs, {"C": [1.0]}),
        GridSearchCV(SVC(), {"decision_function_shape": ["ovo"]}),
        BaggingClassifier(pairs, 2),
        StackingClassifier([("one", GaussianNB())], pairs, cv=2),
    ):
        with pytest.raises(ValueError, match=r"SVC has decision_function_shape='ovo': a score for each pair"):
            BoxCalibratedClassifier(model, "ts").fit(*samples(3))
    chosen = GridSearchCV(pairs, {"decision_function_shape": ["ovr"]})
    for model, classes in ((pairs, 2), (SVC(), 3), (OneVsRestClassifier(pairs), 3), (chosen, 3)):
        rows, y = samples(classes)
        assert BoxCalibratedClassifier(model, "ts").fit(rows, y).score(rows, y) > 0.7


def test_serious_findings_are_warnings_at_the_line_that_fits() -> None:
    logits, labels = data()
    probabilities = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    with pytest.warns(ValidationDataWarning, match="error_rate: error rate") as found:
        BoxCalibrator(method="ts").fit(logits, (labels + 1) % 3)
    with pytest.warns(ValidationDataWarning, match="rows_sum_to_constant") as more:
        BoxCalibrator(method="ts", scores="logits").fit(probabilities, labels)
    with pytest.warns(ValidationDataWarning, match=r"sums to 1: .* or fit their logarithms") as plain:
        fit("ts", probabilities, labels)
    assert {one.filename for one in [*found, *more, *plain]} == {__file__}


@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_checks_fail_only_where_columns_are_no_classes() -> None:
    reasons = dict.fromkeys(
        [*TOO_FEW_COLUMNS, *(name for names in TOO_MANY_COLUMNS.values() for name in names)]
    )
    found = check_estimator(
        BoxCalibrator("ts"), expected_failed_checks=dict.fromkeys(reasons, SQUARE), on_skip=None
    )
    failed = {check["check_name"]: check["exception"] for check in found if check["status"] == "xfail"}
    assert failed.keys() == reasons.keys()
    for error in failed.values():
        cause: BaseException | None = error
        while cause is not None and "columns, but there are" not in str(cause):
            cause = cause.__cause__ or cause.__context__
        assert cause is not None, error
    passed = {check["check_name"] for check in found if check["status"] == "passed"}
    assert len(passed - failed.keys()) > 40


@pytest.mark.parametrize("columns", TOO_MANY_COLUMNS)
def test_these_checks_pass_where_each_column_is_named_a_class(columns: int) -> None:
    estimator = BoxCalibrator("ts", classes=list(range(columns)))
    passed = set()
    for one, check in estimator_checks_generator(estimator, legacy=True):
        name = getattr(check, "func", check).__name__
        if name in TOO_MANY_COLUMNS[columns]:
            check(one)
            passed.add(name)
    assert passed == TOO_MANY_COLUMNS[columns]


def samples(classes: int = 3) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(300, 4))
    cuts = [-0.5, 0.5] if classes == 3 else [0.0]
    return rows, CLASSES[np.digitize(rows[:, 0] + 0.5 * rng.normal(size=300), cuts)]


@pytest.mark.parametrize("classes", [2, 3])
@pytest.mark.parametrize("model", [LinearSVC(random_state=0), GaussianNB()])
def test_a_classifier_is_calibrated_on_scores_of_samples_it_was_not_trained_on(
    model: Any, classes: int
) -> None:
    rows, y = samples(classes)
    classifier = BoxCalibratedClassifier(model, "ts", upper=0.9).fit(rows, y)
    source = "decision_function" if isinstance(model, LinearSVC) else "predict_proba"
    apart = BoxCalibrator(
        "ts", scores="logits" if source == "decision_function" else "probabilities", upper=0.9
    ).fit(cross_val_predict(model, rows, y, cv=5, method=source), y)
    refitted = clone(model).fit(rows, y)
    expected = apart.predict_proba(getattr(refitted, source)(rows))
    np.testing.assert_array_equal(classifier.predict_proba(rows), expected)
    np.testing.assert_array_equal(classifier.classes_, CLASSES[:classes])
    assert classifier.predict_proba(rows).max() <= 0.9
    assert classifier.score(rows, y) > 0.7
    assert classifier.n_features_in_ == 4
    assert classifier.result_.method == "ts"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"method": "platt"}, "no method 'platt'; did you mean 'vector'"),
        ({"upper": 0.3}, "the upper bounds add up to"),
        ({"cv": "prefit"}, r"cv is 'prefit'; .* give FrozenEstimator\(model\)"),
        ({"lower": {"cat": 0.3, "horse": 0.1}}, "lower names 'horse'"),
    ],
)
def test_wrong_arguments_are_named_before_an_estimator_is_fitted(given: dict[str, Any], says: str) -> None:
    class Untrained(LogisticRegression):  # type: ignore[misc]
        def fit(self, *_: Any) -> Self:
            raise AssertionError

    rows = np.random.default_rng(0).normal(size=(60, 2))
    with pytest.raises(ValueError, match=says):
        BoxCalibratedClassifier(Untrained(), **given).fit(rows, np.tile(["cat", "cow", "dog"], 20))


def test_a_frozen_classifier_is_not_fitted() -> None:
    rows, y = samples()
    trained = LogisticRegression().fit(rows[:100], y[:100])
    classifier = BoxCalibratedClassifier(FrozenEstimator(trained), "ts").fit(rows[100:], y[100:])
    expected = BoxCalibrator("ts").fit(trained.decision_function(rows[100:]), y[100:])
    np.testing.assert_array_equal(
        classifier.predict_proba(rows), expected.predict_proba(trained.decision_function(rows))
    )


def test_weights_and_groups_reach_the_estimator_and_the_folds() -> None:
    rows, y = samples()
    weights, groups = np.where(y == "cat", 3.0, 1.0), np.arange(300) // 10
    folds = GroupKFold(4)
    classifier = BoxCalibratedClassifier(LogisticRegression(), "vector", folds).fit(rows, y, weights, groups)
    scores = cross_val_predict(
        LogisticRegression(), rows, y, cv=folds, groups=groups, method="decision_function",
        params={"sample_weight": weights},
    )  # fmt: skip
    refitted = LogisticRegression().fit(rows, y, weights)
    values = refitted.decision_function(rows)
    calibrator, independent = (BoxCalibrator("vector").fit(scores, y, weights, of) for of in (groups, None))
    np.testing.assert_array_equal(classifier.predict_proba(rows), calibrator.predict_proba(values))
    assert (independent.predict_proba(values) != calibrator.predict_proba(values)).any()
    indices = np.searchsorted(calibrator.classes_, y)
    whole = fit("vector", scores, indices, sample_weight=weights, groups=groups).on_arrays
    np.testing.assert_array_equal(calibrator.result_.on_arrays(scores), whole(scores))
    with pytest.warns(UserWarning, match="takes no sample_weight"):
        BoxCalibratedClassifier(KNeighborsClassifier(60), "ts").fit(rows, y, weights)


def test_data_frames_keep_their_names_and_a_class_outside_a_fold_is_named() -> None:
    rows, y = samples()
    table = pd.DataFrame(rows, columns=["a", "b", "c", "d"])
    classifier = BoxCalibratedClassifier(LogisticRegression(), "ts").fit(table, y)
    assert list(classifier.feature_names_in_) == ["a", "b", "c", "d"]
    with pytest.raises(ValueError, match="names should match"):
        classifier.predict_proba(table.rename(columns={"a": "e"}))
    order = np.argsort(y, kind="stable")
    with pytest.raises(ValueError, match="fold 0 has no sample of class cat"):
        BoxCalibratedClassifier(LogisticRegression(), "ts", KFold(2)).fit(rows[order][:200], y[order][:200])
    few = np.r_[order[:150], order[-3:]]
    with pytest.raises(ValueError, match=r"cv is 5, but class emu has 3 samples"):
        BoxCalibratedClassifier(LogisticRegression(), "ts").fit(rows[few], y[few])


@pytest.mark.parametrize("names", [[2, 0, 1], [1, 2, 3], [-7, 40, 3], ["2", "0", "1"], [1.0, 2.0, 3.0]])
@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.float64])
def test_integers_that_name_the_columns_are_names(names: list[Any], kind: Any) -> None:
    if min(map(int, names)) < 0 and kind is np.uint8:
        kind = np.int16
    rng = np.random.default_rng(1)
    logits = 2 * rng.normal(size=(300, 3))
    indices = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    named = np.array(names).astype(int)[indices]
    table = pd.DataFrame(2 * logits, columns=names)
    expected = fit("ts", 2 * logits, indices).on_arrays(2 * logits)
    assert fit("ts", 2 * logits, indices).nll < 0.95 < fit("ts", 2 * logits, (indices + 1) % 3).nll
    np.testing.assert_array_equal(fit("ts", table, named.astype(kind)).on_arrays(2 * logits), expected)
    calibrator = BoxCalibrator("ts").fit(table, named)
    order = np.argsort(np.array(names).astype(int))
    for given in (table, table[table.columns[::-1]]):
        np.testing.assert_allclose(calibrator.predict_proba(given), expected[:, order], rtol=1e-6)
    with pytest.raises(InvalidDataError, match=r"labels\[1\] is 9, which names no column of the logits"):
        fit("ts", table, np.where(np.arange(300) == 1, 9, named))


def drawn(classes: int = 3) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    logits = 2 * rng.normal(size=(300, classes))
    return 2 * logits, (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)


NAMED = [  # classes, and the names of their columns
    (["ant", "bee", "cat"], ["p_ant", "p_bee", "p_cat"]),
    (["ant", "bee", "cat"], ["ant_score", "bee_score", "cat_score"]),
    (["ant", "bee", "cat"], [" ant", " bee", "cat "]),
    (["ant", "bee", "\u00e9"], ["ant", "bee", "e\u0301"]),
    (["ant", "bee", "cat"], [0, 1, 2]),
    (["ant", "bee", "cat"], ["0", "1", "2"]),
    ([1.0, 2.0, 3.0], ["1", "2", "3"]),
    ([1.0, 2.0, 3.0], [1, 2, 3]),
    ([1, 2, 3], [1.0, 2.0, 3.0]),
    ([1, 2, 3], ["class 1", "class 2", "class 3"]),
    ([10, 20, 30], [10, 20, 30]),
    ([0, 1, 2], [0, 1, 2]),
]


@pytest.mark.filterwarnings("ignore:X has feature names")
@pytest.mark.parametrize(("classes", "columns"), NAMED)
def test_columns_are_matched_with_the_classes_by_name(classes: list[Any], columns: list[Any]) -> None:
    logits, indices = drawn()
    y = np.array(classes)[indices]
    named = pd.DataFrame(logits, columns=columns)
    turned = named.iloc[:, [2, 0, 1]]
    expected = BoxCalibrator("ts").fit(logits, y).predict_proba(logits)
    true = expected[np.arange(300), indices]
    assert round(float(-np.log(true).mean()), 2) == 0.6
    for fitted_to, given in ((turned, named), (turned, turned), (named, turned), (logits, turned)):
        found = BoxCalibrator("ts").fit(fitted_to, y).predict_proba(given)
        assert np.abs(found - expected).max() < 1e-9
    of_array = BoxCalibrator("ts").fit(named, y)
    assert of_array.predict_proba(named.iloc[:1].rename(columns=str)).shape == (1, 3)


def test_columns_may_have_other_names_of_the_classes_than_in_the_fit() -> None:
    logits, indices = drawn()
    y = np.array(["ant", "bee", "cat"])[indices]
    fitted = BoxCalibrator("ts").fit(
        pd.DataFrame(logits, columns=["ant", "bee", "cat"])[["cat", "ant", "bee"]], y
    )
    expected = BoxCalibrator("ts").fit(logits, y).predict_proba(logits)
    named = pd.DataFrame(logits, columns=["p_ant", "p_bee", "p_cat"])
    assert np.abs(fitted.predict_proba(named[["p_bee", "p_cat", "p_ant"]]) - expected).max() < 1e-9
    with pytest.raises(InvalidDataError, match="the classes are"):
        fitted.predict_proba(named.rename(columns={"p_cat": "p_cow"}))
    scores, answers = logits[:, 1] - logits[:, 0], np.where(indices == 1, "yes", "no")
    of_no = BoxCalibrator("ts").fit(pd.DataFrame({"no": -scores}), answers)
    turned = of_no.predict_proba(pd.DataFrame({"yes": scores}))
    assert np.abs(turned - of_no.predict_proba(pd.DataFrame({"no": -scores}))).max() < 1e-9


def test_boolean_columns_are_names() -> None:
    logits, indices = drawn(2)
    y = indices.astype(bool)
    expected = BoxCalibrator("ts").fit(logits, y).predict_proba(logits)
    for columns in ([True, False], ["True", "False"], ["p_True", "p_False"]):
        table = pd.DataFrame(logits[:, ::-1], columns=columns)
        assert np.abs(BoxCalibrator("ts").fit(table, y).predict_proba(table) - expected).max() < 1e-9
    table = pd.DataFrame(logits[:, ::-1], columns=[True, False])
    found = fit("ts", table, y)
    assert np.abs(found.on_arrays(logits[:, ::-1])[:, ::-1] - expected).max() < 1e-9
    assert label_indices(np.array([True, False]), ["True", "False"]).tolist() == [0, 1]
    assert label_indices(np.array([True, False]), ["1", "0"]).tolist() == [0, 1]
    assert label_indices(np.array([True, False]), ["no", "yes"]).tolist() == [True, False]


@pytest.mark.parametrize("columns", [["f0", "f1", "f2"], ["a", "b", "c"], ["ant", "bee", "Unnamed: 0"]])
def test_columns_with_other_names_are_not_read_by_position(columns: list[str]) -> None:
    logits, indices = drawn()
    y = np.array(["ant", "bee", "cat"])[indices]
    table = pd.DataFrame(logits, columns=columns)
    expected = rf"the columns are \['{columns[0]}', .*the classes are \['ant', .*; or give an array"
    with pytest.raises(ValueError, match=expected):
        BoxCalibrator("ts").fit(table, y)
    with pytest.raises(ValueError, match=expected):
        BoxCalibrator("ts").fit(logits, y).predict_proba(table)


def test_columns_without_names_are_in_the_order_of_the_classes() -> None:
    polars: Any = pytest.importorskip("polars")
    logits, indices = drawn()
    y = np.array([2, 0, 1])[indices]
    expected = BoxCalibrator("ts", classes=[2, 0, 1]).fit(logits, y).predict_proba(logits)
    for table in (pd.DataFrame(logits), polars.DataFrame(logits)):
        found = BoxCalibrator("ts", classes=[2, 0, 1]).fit(table, y)
        assert np.array_equal(found.predict_proba(table), expected)


def test_one_column_is_the_score_of_the_class_that_it_names() -> None:
    logits, indices = drawn(2)
    y, second = np.array(["no", "yes"])[indices], logits[:, 1] - logits[:, 0]
    expected = BoxCalibrator("ts").fit(second, y).predict_proba(second)
    for name, sign in (("yes", 1), ("p_yes", 1), ("score", 1), ("no", -1), ("p_no", -1)):
        for table in (pd.DataFrame({name: sign * second}), pd.Series(sign * second, name=name)):
            found = BoxCalibrator("ts").fit(table, y).predict_proba(table)
            assert np.abs(found - expected).max() < 1e-9
    for table in (pd.DataFrame({"x": second}), pd.Series(second, name="x")):
        with pytest.raises(
            ValueError, match=r"the column 'x' is named as no score.*score of 'yes', set scores"
        ):
            BoxCalibrator("ts").fit(table, y)
        found = BoxCalibrator("ts", scores="logits").fit(table, y).predict_proba(table)
        assert np.abs(found - expected).max() < 1e-9


def test_numbers_of_pandas_that_may_be_missing_are_numbers() -> None:
    logits = np.random.default_rng(1).normal(size=(100, 3))
    indices = logits.argmax(axis=1)
    table = pd.DataFrame(logits, columns=list("abc")).convert_dtypes()
    found = fit("ts", table, pd.Series(indices, dtype="Int64")).on_arrays
    assert (
        found.to_bytes() == fit("ts", pd.DataFrame(logits, columns=list("abc")), indices).on_arrays.to_bytes()
    )
    table.iloc[7, 1] = pd.NA
    with pytest.raises(InvalidDataError, match="logits must be finite; row 7, class 1 is nan"):
        fit("ts", table, indices)


def test_integers_that_count_the_columns_are_indices() -> None:
    logits = np.random.default_rng(1).normal(size=(100, 3))
    indices = logits.argmax(axis=1)
    table = pd.DataFrame(logits)
    assert label_indices(indices, ["0", "1", "2"]) is indices
    assert (
        fit("ts", table, indices).on_arrays.to_bytes()
        == fit("ts", table, indices.astype(str)).on_arrays.to_bytes()
    )


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_tables_give_the_answers_of_arrays(library: str) -> None:
    frames: Any = pytest.importorskip(library)
    rng = np.random.default_rng(0)
    logits, weights = 4 * rng.normal(size=(300, 3)), rng.uniform(0.5, 2.0, 300)
    indices = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(axis=1)
    table = frames.DataFrame(dict(zip(CLASSES, logits.T, strict=True)))
    y, weight = frames.Series(CLASSES[indices]), frames.Series(weights)
    expected = BoxCalibrator("ts", upper=0.9).fit(logits, CLASSES[indices], weights)
    calibrator = BoxCalibrator("ts", classes=frames.Series(CLASSES), upper=frames.Series([0.9] * 3))
    calibrator.fit(table, y, weight)
    probabilities = calibrator.predict_proba(table[["emu", "cat", "dog"]])
    assert probabilities.max() == 0.9
    np.testing.assert_array_equal(probabilities, expected.predict_proba(logits))
    np.testing.assert_array_equal(calibrator.predict(table), expected.predict(logits))
    other = frames.DataFrame({"cat": logits[:, 0], "dog": logits[:, 1], "fox": logits[:, 2]})
    with pytest.raises(ValueError, match="name each column by its class, and give"):
        BoxCalibrator("ts").fit(other, y)
    result = fit("ts", table, frames.Series(indices), sample_weight=weight)
    np.testing.assert_array_equal(result.on_arrays(table), expected.result_.on_arrays(logits))
    with pytest.raises(InvalidDataError, match="the logits have more than one column 'cat'"):
        fit("ts", pd.DataFrame(logits, columns=["cat", "emu", "cat"]), indices)
    classifier = BoxCalibratedClassifier(LogisticRegression(), "ts").fit(table, y, weight)
    plain = BoxCalibratedClassifier(LogisticRegression(), "ts").fit(logits, CLASSES[indices], weights)
    np.testing.assert_array_equal(classifier.predict_proba(table), plain.predict_proba(logits))


def test_the_columns_of_an_array_are_those_of_the_fit() -> None:
    logits = 4 * np.random.default_rng(0).normal(size=(90, 3))
    calibrator = BoxCalibrator("ts").fit(
        pd.DataFrame(logits, columns=["emu", "cat", "dog"]), np.array(["emu", "cat", "dog"])[logits.argmax(1)]
    )
    message = r"or give an array, with the columns in the order of `fit`: \['emu', 'cat', 'dog'\]"
    with pytest.raises(InvalidDataError, match=message):
        calibrator.predict_proba(pd.DataFrame(logits, columns=["a", "b", "c"]))
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        assert calibrator.predict([[0.0, 6.0, 0.0]]).tolist() == ["cat"]


@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_one_column_of_scores_may_be_a_list(kind: Callable[[list[float]], Any]) -> None:
    scores = np.random.default_rng(0).normal(size=60).tolist()
    calibrator = BoxCalibrator("ts", scores="logits").fit(kind(scores), [int(one > 0) for one in scores])
    assert calibrator.predict(kind([-9.0, 9.0])).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("scale", "kind"), [(1.0, "probabilities"), (100.0, "percent"), (39.0, None), (-100.0, None)]
)
def test_one_column_of_probabilities_or_percentages_is_told(scale: float, kind: Any) -> None:
    rows, y = samples(2)
    scores = scale / (1 + np.exp(-2 * rows[:, 0]))
    if kind is None:
        BoxCalibrator("ts").fit(scores, y)
        return
    with pytest.raises(ValueError, match=f'all between 0 and {scale:g}. Set scores="{kind}" if'):
        BoxCalibrator("ts").fit(scores, y)
    BoxCalibrator("ts", scores=kind).fit(scores, y)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_series_is_one_column_of_scores(library: str) -> None:
    frames: Any = pytest.importorskip(library)
    rows, y = samples(2)
    scores = 2 * rows[:, 0]
    expected = BoxCalibrator("ts").fit(scores, y)
    found = BoxCalibrator("ts").fit(frames.Series(scores), frames.Series(y))
    np.testing.assert_array_equal(found.predict_proba(frames.Series(scores)), expected.predict_proba(scores))
    # A log odd between 0 and 1 is no probability: what is fitted shows the kind of the scores.
    pairs = BoxCalibrator("ts").fit(np.outer(scores, [0, 1]), y).predict_proba([[0.0, 0.4]])
    np.testing.assert_allclose(expected.predict_proba(np.array([0.4])), pairs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", [LogisticRegression(), pytest.param(GaussianNB(), marks=pytest.mark.long)])
def test_the_classifier_passes_all_of_scikit_learns_checks(model: Any) -> None:
    """With 3 folds, as scikit-learn checks its own: one of its data sets has 3 samples of a class."""
    found = check_estimator(BoxCalibratedClassifier(model, "ts", cv=3), on_skip=None)
    assert {check["status"] for check in found} <= {"passed", "skipped"}
    assert len(found) > 50
