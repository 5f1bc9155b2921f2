"""The estimators keep scikit-learn's conventions, and give what `fit` gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, cross_val_predict, cross_val_score
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.svm import LinearSVC
from sklearn.utils.estimator_checks import check_estimator, estimator_checks_generator

from boxcal import BoxCalibratedClassifier, BoxCalibrator, fit
from boxcal.calibrators.errors import ValidationDataWarning

CLASSES = np.array(["cat", "dog", "emu"])
SQUARE = "the logits need one column for each class, and the check's data have other columns"


def data(count: int = 300) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    rng = np.random.default_rng(4)
    labels = rng.integers(0, 3, count)
    logits = rng.normal(size=(count, 3))
    logits[np.arange(count), labels] += 1.0
    return 4 * logits, labels


def test_it_gives_what_fit_gives() -> None:
    logits, labels = data()
    estimator = BoxCalibrator(method="ts").fit(logits, CLASSES[labels])
    expected = fit("ts", logits, labels).calibrator(torch.from_numpy(logits))
    np.testing.assert_array_equal(estimator.predict_proba(logits), np.asarray(expected))
    assert list(estimator.classes_) == list(CLASSES)
    assert set(estimator.predict(logits)) <= set(CLASSES)
    assert estimator.get_params()["method"] == "ts"
    assert estimator.result_.nll < 2


def test_bounds_hold_and_ties_go_to_the_larger_logit() -> None:
    logits, labels = data()
    bounded = BoxCalibrator(method="ts", lower=[0.05, 0.0, 0.0], upper=0.4).fit(logits, labels)
    probabilities = bounded.predict_proba(logits)
    assert probabilities.max() <= 0.4
    assert probabilities[:, 0].min() >= 0.05
    np.testing.assert_array_equal(bounded.predict(logits), logits.argmax(axis=1))
    with pytest.raises(ValueError, match="add up"):
        BoxCalibrator(method="ts", upper=0.1).fit(logits, labels)


def test_classes_give_the_order_of_the_columns() -> None:
    logits, labels = data()
    few = labels > 0
    estimator = BoxCalibrator(method="ts", classes=CLASSES[::-1])
    with pytest.warns(ValidationDataWarning, match="absent_classes: class 0"):
        estimator.fit(logits[few], CLASSES[::-1][labels[few]])
    assert list(estimator.classes_) == list(CLASSES[::-1])
    assert estimator.score(logits, CLASSES[::-1][labels]) > 0.5
    with pytest.raises(ValueError, match=r"= 3 columns, but there are 2 classes in y; give all"):
        BoxCalibrator(method="ts").fit(logits[few], labels[few])
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


def test_probabilities_are_not_taken_for_logits() -> None:
    logits, labels = data()
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    with pytest.raises(ValueError, match=r"look like probabilities.* Set scores=probabilities"):
        BoxCalibrator(method="ts").fit(probabilities, labels)
    ours = BoxCalibrator(method="ts", scores="probabilities").fit(probabilities, labels)
    expected = BoxCalibrator(method="ts").fit(logits, labels).predict_proba(logits)
    np.testing.assert_allclose(ours.predict_proba(probabilities), expected, rtol=1e-6)
    assert np.isfinite(ours.predict_proba([[0.0, 0.0, 1.0]])).all()
    with pytest.raises(ValueError, match=r"probabilities\[1\] sums to 1.5; the probabilities of a sample"):
        ours.predict_proba([[0.0, 0.0, 1.0], [0.5, 0.5, 0.5]])
    with pytest.raises(ValueError, match="'odds'"):
        BoxCalibrator(method="ts", scores="odds").fit(logits, labels)  # type: ignore[arg-type]


def test_serious_findings_are_warnings() -> None:
    logits, labels = data()
    with pytest.warns(ValidationDataWarning, match="error_rate: error rate"):
        BoxCalibrator(method="ts").fit(logits, (labels + 1) % 3)
    with pytest.warns(ValidationDataWarning, match="rows_sum_to_constant"):
        BoxCalibrator(method="ts", scores="logits").fit(
            np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)), labels
        )


def checks() -> list[Any]:
    """scikit-learn's own checks that can be given to an estimator of logits."""
    found = []
    for estimator, check in estimator_checks_generator(BoxCalibrator(method="ts"), legacy=True):
        found.append(pytest.param(estimator, check, id=getattr(check, "func", check).__name__))
    return found


@pytest.mark.filterwarnings("ignore::boxcal.calibrators.errors.ValidationDataWarning")
@pytest.mark.parametrize(("estimator", "check"), checks())
def test_scikit_learns_checks(estimator: Any, check: Any) -> None:
    try:
        check(estimator)
    except (AssertionError, ValueError) as error:
        cause: BaseException | None = error
        while cause is not None and "columns, but there are" not in str(cause):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        pytest.skip(SQUARE)


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
    expected = BoxCalibrator("vector").fit(scores, y, weights).predict_proba(refitted.decision_function(rows))
    np.testing.assert_array_equal(classifier.predict_proba(rows), expected)
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


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", [LogisticRegression(), GaussianNB()])
def test_the_classifier_passes_all_of_scikit_learns_checks(model: Any) -> None:
    """With 3 folds, as scikit-learn checks its own: one of its data sets has 3 samples of a class."""
    found = check_estimator(BoxCalibratedClassifier(model, "ts", cv=3), on_skip=None)
    assert {check["status"] for check in found} <= {"passed", "skipped"}
    assert len(found) > 50
