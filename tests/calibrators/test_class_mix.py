"""How the samples were drawn, where the sender says it: by class, or in the proportions of the requests."""

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.special import softmax

from boxcal.calibrators import BoxCalibrator, fit
from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.checks import DataWarning, check_fit
from boxcal.calibrators.data import check_validation_set
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.evaluation.report import cross_fitted_report
from boxcal.calibrators.label_checks import class_offsets
from tests.calibrators.samples import Floats, Set

MEANS = np.array([0.0, -2.0, -4.0])
"""Of the true logits of three classes, whose frequencies are .677, .250 and .073."""
SHARP = 1.7


def true_logits(count: int, seed: int) -> Floats:
    return np.asarray(2.0 * np.random.default_rng(seed).normal(size=(count, 3)) + MEANS)


def labelled(logits: Floats, seed: int) -> Set:
    """Give a sharper model's logits, and labels of the true ones."""
    threshold = np.random.default_rng(seed).random((len(logits), 1))
    return SHARP * logits, (softmax(logits, axis=1).cumsum(axis=1) > threshold).argmax(axis=1)


def by_class(count: int) -> Set:
    """Draw so many samples of each class."""
    logits, labels = labelled(true_logits(40 * count, 0), 1)
    kept = np.concatenate([np.flatnonzero(labels == one)[:count] for one in range(3)])
    return logits[kept], labels[kept]


def excess(calibrator: ArrayCalibrator) -> float:
    """Mean NLL among requests above that of the true probabilities, nats."""
    logits = true_logits(40_000, 2)
    truth = softmax(logits, axis=1)
    answers = calibrator(SHARP * logits)
    return float((truth * (np.log(truth) - np.log(answers))).sum(axis=1).mean())


def found(method: str, data: Set, class_mix: str) -> dict[str, DataWarning]:
    checked = check_validation_set(*data, class_mix=class_mix)  # type: ignore[arg-type]
    return {one.code: one for one in check_fit(method, checked)}


def test_samples_drawn_by_class_are_fitted_as_requests_are() -> None:
    data = by_class(300)
    for method, least, most in (("ts", 0.02, 0.002), ("auto", 0.1, 0.002)):
        assert excess(fit(method, *data).on_arrays) > least
        assert excess(fit(method, *data, class_mix="resampled").on_arrays) < most
    warning = found("auto", data, "resampled")["class_mix"]
    assert warning.severity == "warning"
    assert warning.message == (
        "weights make classes as frequent as the logits expect: class 0 62.73% (33.33% of the samples), class"
        " 1 28.31% (33.33% of the samples), class 2 8.96% (33.33% of the samples)"
    )
    assert cross_fitted_report("ts", *data, class_mix="resampled").effective == pytest.approx(622.81, abs=0.1)


def test_the_offsets_are_those_of_the_largest_posterior() -> None:
    """Where its derivatives vanish, in the slope and in each offset, whose prior has the variance 9."""
    logits, labels = by_class(300)
    offsets = class_offsets(logits, labels)
    assert offsets is not None

    own = logits[np.arange(900), labels].sum()

    def shares(slope: float) -> Floats:
        return softmax(slope * logits + offsets, axis=1)

    slope = brentq(lambda one: float((shares(one) * logits).sum()) - own, 0.1, 2.0)
    assert 1 / slope == pytest.approx(SHARP, rel=0.1)
    assert np.abs(shares(slope).sum(axis=0) - 300 + offsets / 9).max() < 0.01
    drawn = -np.log([0.677, 0.250, 0.073])
    assert np.abs(offsets - offsets.mean() - (drawn - drawn.mean())).max() < 0.2


def test_a_class_without_samples_has_no_part_in_the_offsets() -> None:
    logits, labels = by_class(300)
    kept = labels > 0
    offsets, others = (
        class_offsets(logits[kept], labels[kept]),
        class_offsets(logits[kept, 1:], labels[kept] - 1),
    )
    assert offsets is not None
    assert others is not None
    assert offsets.tolist() == pytest.approx([0.0, *others], abs=1e-6)


EXPECTS = np.array([0.0, 0.0, 7.0])
"""What a model adds that expects so many more of class 2, as one trained on as many of each."""


@pytest.mark.parametrize(("few", "most"), [(0, 0.48), (4, 0.38)])
def test_a_class_that_is_rare_among_requests_is_made_rare(few: int, most: float) -> None:
    """If nobody says so it may be missing by design, and is left. The NLL of the true odds is .360."""
    logits = true_logits(1000, 3) + np.array([0.0, 0.0, -2.0])
    scores, labels = labelled(logits, 4)
    kept = (labels < 2) | ((labels == 2).cumsum() <= few)
    data = scores[kept] + EXPECTS, labels[kept]
    test, truth = labelled(true_logits(20_000, 5) + np.array([0.0, 0.0, -2.0]), 6)

    def loss(class_mix: str | None) -> float:
        answers = fit("auto", *data, class_mix=class_mix).on_arrays(test + EXPECTS)  # type: ignore[arg-type]
        return float(-np.log(answers[np.arange(len(truth)), truth]).mean())

    assert loss(None) > 0.6
    assert loss("as_traffic") < most
    severities = {code: one.severity for code, one in found("auto", data, "as_traffic").items()}
    assert severities == ({"absent_classes": "warning"} if few == 0 else {})


def test_equal_numbers_of_many_classes_are_a_question() -> None:
    """The logits expect .63, .28 and .09; those of balanced requests expect a third of each."""
    logits, labels = by_class(300)
    (asked,) = check_fit("auto", check_validation_set(logits, labels))
    assert (asked.code, asked.severity) == ("class_mix", "warning")
    assert "all 3 classes have 300 samples" in asked.message
    assert "expect 9.0% of class 2 and 62.7% of class 0" in asked.message
    assert check_fit("auto", check_validation_set(logits[:-1], labels[:-1])) == []
    assert check_fit("auto", check_validation_set(logits, labels, class_mix="as_traffic")) == []
    balanced = logits + np.array([-0.91, -0.12, 1.03])
    assert check_fit("auto", check_validation_set(balanced, labels)) == []


def test_what_the_sender_says_is_not_asked_again() -> None:
    """Equal numbers of two classes, of which the logits expect one in twenty."""
    rng = np.random.default_rng(0)
    odds = 2.0 * rng.normal(size=20_000) - 3.0
    labels = (rng.random(20_000) < 1.0 / (1.0 + np.exp(-odds))).astype(np.int64)
    kept = np.concatenate([np.flatnonzero(labels == one)[:500] for one in range(2)])
    logits = np.stack([np.zeros(1000), odds[kept]], axis=1)
    plain = check_fit("ts", check_validation_set(logits, labels[kept]))
    assert [(one.code, one.severity) for one in plain] == [("class_mix", "serious")]
    assert "fit with class_mix=resampled, or with weights" in plain[0].message
    assert found("ts", (logits, labels[kept]), "as_traffic") == {}
    told = found("ts", (logits, labels[kept]), "resampled")
    assert [(one.code, one.severity) for one in told.values()] == [("class_mix", "warning")]


def test_samples_drawn_by_class_need_logits_that_say_how_frequent_classes_are() -> None:
    logits, labels = by_class(100)
    flat = np.random.default_rng(0).normal(size=logits.shape)
    for silent in (flat, 0.0 * flat):
        with pytest.raises(
            InvalidDataError, match="of which these samples show too little: give each sample as"
        ):
            fit("ts", silent, labels, class_mix="resampled")
    with pytest.raises(InvalidDataError, match="either `sample_weight` or class_mix=resampled"):
        fit("ts", logits, labels, class_mix="resampled", sample_weight=labels + 1.0)
    with pytest.raises(
        InvalidDataError, match="class_mix must be `as_traffic` or `resampled`, not 'traffic'"
    ):
        fit("ts", logits, labels, class_mix="traffic")  # type: ignore[arg-type]


def test_the_estimator_takes_it_too() -> None:
    logits, labels = by_class(100)
    own = BoxCalibrator("ts", class_mix="resampled").fit(logits, labels).result_.on_arrays
    assert own.to_bytes() == fit("ts", logits, labels, class_mix="resampled").on_arrays.to_bytes()
