"""Each check of validation data finds what it is for, and finds nothing in good data."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from boxcal.calibrators.checks import DataWarning, check_changed, check_data, check_fit, check_known
from boxcal.calibrators.data import check_validation_set, fold_masks
from boxcal.calibrators.evaluation.crossfit import cross_fit
from boxcal.calibrators.label_checks import _nearest, association, is_associated, shared_residuals
from boxcal.calibrators.method import parse
from boxcal.calibrators.row_statistics import RowStatistics, Sketch
from tests.calibrators.samples import Floats, Labels, Set, drawn, softmax, variants


def warnings_of(logits: Floats, labels: Labels, groups: Labels | None = None) -> list[DataWarning]:
    return check_data(check_validation_set(logits, labels, groups=groups))


def shifted(logits: Floats, labels: Labels) -> Set:
    return logits, (labels + 1) % logits.shape[1]


def permuted(logits: Floats, labels: Labels) -> Set:
    rng = np.random.default_rng(1)
    some = np.flatnonzero(rng.random(len(labels)) < 0.1)
    changed = labels.copy()
    changed[some] = labels[rng.permutation(some)]
    return logits, changed


def without_class(logits: Floats, labels: Labels) -> Set:
    return logits[labels != 3], labels[labels != 3]


def rare_class(logits: Floats, labels: Labels, few: int = 2) -> Set:
    kept = (labels != 3) | (np.cumsum(labels == 3) <= few)
    return logits[kept], labels[kept]


def repeated(logits: Floats, labels: Labels) -> Set:
    return np.tile(logits, (10, 1)), np.tile(labels, 10)


def zeros(logits: Floats, labels: Labels) -> Set:
    changed = np.log(softmax(logits))
    changed[np.arange(20), labels[:20]] = np.log(np.finfo(np.float32).tiny)
    return changed, labels


RARE = 0.05
"""Share of class 1 among the requests."""


def by_class(logits: Floats, labels: Labels) -> Set:
    """Draw equal numbers of two classes, for a model of requests with few of class 1."""
    few = np.bincount(labels).min()
    kept = np.concatenate([np.flatnonzero(labels == one)[:few] for one in range(2)])
    return logits[kept] + np.log([1.0 - RARE, RARE]), labels[kept]


FOUND: dict[str, tuple[Callable[[Floats, Labels], Set], str]] = {
    "error_rate": (shifted, "serious"),
    "unrelated_labels": (permuted, "serious"),
    "absent_classes": (without_class, "serious"),
    "one_class": (lambda x, y: (x[y == 1], y[y == 1]), "serious"),
    "no_errors": (lambda x, y: (x, x.argmax(axis=1)), "serious"),
    "class_mix": (lambda x, y: by_class(*drawn(1000, 2)), "serious"),
    "rare_classes": (rare_class, "warning"),
    "duplicates": (repeated, "warning"),
    "rows_sum_to_constant": (lambda x, y: (softmax(x), y), "serious"),
    "rows_normalised": (lambda x, y: (x / np.linalg.norm(x, axis=1, keepdims=True), y), "serious"),
    "constant_rows": (lambda x, y: (np.r_[np.ones((30, 10)), x[30:]], y), "serious"),
    "zero_probability": (zeros, "warning"),
    "clipped_values": (lambda x, y: (np.maximum(x, -3.0), y), "warning"),
}


@pytest.mark.parametrize("code", FOUND)
def test_a_defect_is_named(code: str) -> None:
    spoil, severity = FOUND[code]
    logits, labels = spoil(*drawn())
    found = {warning.code: warning for warning in warnings_of(logits, labels)}
    assert code in found
    assert found[code].severity == severity
    assert 0 < found[code].rows <= len(labels)


def test_certain_answers_are_not_called_normalised() -> None:
    """Logarithms of probabilities 0 and 1, as of trees, have one norm; so has a row divided by its own."""
    logits = np.where(np.eye(4)[np.arange(400) % 4] > 0, 0.0, -87.3)
    labels = np.where(np.arange(400) % 7 == 0, 0, np.arange(400) % 4)
    assert "rows_normalised" not in {warning.code for warning in warnings_of(logits, labels)}
    assert "rows_normalised" in {warning.code for warning in warnings_of(logits + 80.0, labels)}


@pytest.mark.parametrize("classes", [3, 10, 100])
@pytest.mark.parametrize("added", [1e3, 1e4, 1e5])
def test_a_number_added_to_all_logits_is_no_scale(classes: int, added: float) -> None:
    logits, labels = drawn(2000, classes)
    assert warnings_of(logits + added, labels) == []
    assert warnings_of((logits + added).astype(np.float32), labels) == []


@pytest.mark.parametrize("classes", [2, 3, 10, 100])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_good_data_give_no_warning(classes: int, temperature: float) -> None:
    for seed in range(5):
        assert warnings_of(*drawn(2000, classes, temperature=temperature, seed=seed)) == []


def weak(count: int, classes: int, signal: float, offset: float, seed: int) -> Set:
    """Overconfident logits of a model with a given signal, offset for the last class."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    logits = signal * rng.normal(size=(count, classes))
    logits[np.arange(count), labels] += signal**2
    logits[:, -1] += offset
    return 6 * logits, labels


@pytest.mark.parametrize(
    ("classes", "signal", "offset", "accuracy"),
    [
        pytest.param(3, 0.25, 0.0, 0.42, marks=pytest.mark.long),
        pytest.param(3, 0.5, 0.0, 0.49, marks=pytest.mark.long),
        (2, 1.0, 3.0, 0.54),
        pytest.param(2, 2.0, 0.0, 0.92, marks=pytest.mark.long),
        pytest.param(3, 2.5, 0.0, 0.94, marks=pytest.mark.long),
    ],
)
def test_weak_models_are_told_from_wrong_labels(
    classes: int, signal: float, offset: float, accuracy: float
) -> None:
    clean, random, moved = [], [], []
    for seed in range(100):
        logits, labels = weak(500, classes, signal, offset, seed)
        assert (logits.argmax(axis=1) == labels).mean() == pytest.approx(accuracy, abs=0.09)
        rng = np.random.default_rng(seed)
        clean.append(codes(warnings_of(logits, labels)))
        random.append(codes(warnings_of(logits, rng.permutation(labels))))
        moved.append(codes(warnings_of(logits, (labels + 1) % classes)))
    assert sum("error_rate" in found for found in clean) <= 1
    assert sum("error_rate" in found for found in random) >= 93
    assert sum("error_rate" in found for found in moved) == 100


def test_rates_of_rare_events_have_a_decimal() -> None:
    logits, labels = np.tile([7.0, 0.0], (1000, 1)), (np.arange(1000) < 3).astype(np.int64)
    (found,) = (one for one in warnings_of(logits, labels) if one.code == "error_rate")
    assert found.message.startswith("error rate 0.3%, where the logits themselves expect 0.1%: ")


@pytest.mark.parametrize("share", [0.02, 0.05, 0.2])
def test_the_share_of_unrelated_labels_is_estimated(share: float) -> None:
    logits, labels = drawn(5000, 20, temperature=2.0)
    rng = np.random.default_rng(1)
    random = rng.random(len(labels)) < share
    labels[random] = rng.integers(0, 20, random.sum())
    (warning,) = warnings_of(logits, labels)
    assert (warning.code, warning.severity) == ("unrelated_labels", "serious" if share > 0.03 else "warning")
    assert warning.rows == pytest.approx(random.sum(), abs=0.015 * len(labels))


@pytest.mark.parametrize("unit", [1e-4, 1e4])
def test_the_unit_of_the_logits_does_not_make_labels_unrelated(unit: float) -> None:
    """As of scores that no softmax has seen."""
    logits, labels = drawn(1000, 10)
    assert "unrelated_labels" not in codes(warnings_of(unit * logits, labels))
    labels = np.where(np.arange(1000) % 10 == 0, np.random.default_rng(0).integers(0, 10, 1000), labels)
    (found,) = [one for one in warnings_of(unit * logits, labels) if one.code == "unrelated_labels"]
    assert found.severity == "serious"
    assert found.rows == pytest.approx(100, abs=30)


@pytest.mark.parametrize(("classes", "count"), [(3, 2000), (10, 1000), (100, 1000)])
def test_a_model_that_is_too_sure_of_some_rows_needs_no_wrong_labels(classes: int, count: int) -> None:
    """Three times too sure of one half, and not sure enough of the other, as of two kinds of photographs."""
    logits, labels = drawn(count, classes)
    logits *= np.where(np.arange(count) % 2 == 0, 3.0, 0.7)[:, None]
    assert "unrelated_labels" not in codes(warnings_of(logits, labels))
    rng = np.random.default_rng(0)
    labels = np.where(rng.random(count) < 0.1, rng.integers(0, classes, count), labels)
    found = {one.code: one.severity for one in warnings_of(logits, labels)}
    assert found["unrelated_labels"] == "serious"


def test_ties_of_a_forest_of_two_classes_are_not_serious() -> None:
    """Of 100 trees 50 vote for each class, in as many rows as 49 or 51 do."""
    rng = np.random.default_rng(0)
    votes = rng.binomial(100, rng.beta(3.0, 3.0, 2000))
    labels = (rng.random(2000) < votes / 100).astype(np.int64)
    shares = np.column_stack([100 - votes, votes]) / 100
    (found,) = (one for one in warnings_of(np.log(np.maximum(shares, 1e-9)), labels) if one.rows)
    assert (found.code, found.severity) == ("constant_rows", "warning")
    assert found.rows == (votes == 50).sum() > 20
    shares[:200] = 0.5
    found_again = warnings_of(np.log(np.maximum(shares, 1e-9)), labels)
    assert ("constant_rows", "serious") in [(one.code, one.severity) for one in found_again]


def test_a_warning_names_the_error_rate_the_class_or_the_number_of_rows() -> None:
    logits, labels = drawn()
    (warning,) = warnings_of(*shifted(logits, labels))
    error = np.mean(logits.argmax(axis=1) != (labels + 1) % 10)
    assert warning.message.startswith(f"error rate {error:.1%}, where the logits themselves expect")
    assert "labels may not belong to these logits" in warning.message
    (absent,) = warnings_of(*without_class(logits, labels))
    assert "class 3 has no sample among" in absent.message
    named = check_validation_set(*without_class(logits, labels), classes=[*"012", "cat", *"456789"])
    assert "class 'cat' has no sample among" in check_data(named)[0].message
    (zero,) = (one for one in warnings_of(*zeros(logits, labels)) if one.code == "zero_probability")
    assert (zero.rows, zero.message[:44]) == (20, "20 rows give the true class probability 0. A")


@pytest.mark.parametrize(("count", "shown"), [(1000, "3.9%"), (20_000, "4.3%")])
def test_the_share_that_the_logits_expect_is_named(count: int, shown: str) -> None:
    logits, labels = by_class(*drawn(count, 2, temperature=1.0))
    (found,) = warnings_of(logits, labels)
    assert f"but the logits expect {shown} of class 1." in found.message
    assert np.ptp(np.bincount(labels)) == 0
    (other,) = warnings_of(logits[:, ::-1], 1 - labels)
    assert f"but the logits expect {shown} of class 0." in other.message


@pytest.mark.parametrize("classes", [2, 3])
def test_labels_that_take_turns_are_seen_as_in_any_order(classes: int) -> None:
    """Every second or third row of a long set has a label of the same class."""
    logits, labels = drawn(10_000 * classes - 500, classes, temperature=1.0)
    order = np.argsort(labels, kind="stable")
    fewest = np.bincount(labels).min()
    turns = np.column_stack([order[labels[order] == k][:fewest] for k in range(classes)]).ravel()
    assert len(turns) > 10_000 * (classes - 1)
    assert labels[turns[:4]].tolist() == [k % classes for k in range(4)]
    assert association(logits[turns], labels[turns]) > 20
    assert warnings_of(logits[turns], labels[turns]) == []


@pytest.mark.parametrize(
    ("count", "separation", "belong", "fewest", "most"),
    [(500, 0.74, True, 0.0, 0.03), (2000, 0.74, True, 0.0, 0.04), (2000, 1.19, False, 0.7, 1.0)],
)
def test_few_events_are_too_few_to_show_that_labels_do_not_belong(
    count: int, separation: float, belong: bool, fewest: float, most: float
) -> None:
    """One in a hundred, ranked first in 70 or 80 %: of 500 clean samples half were refused, of 2,000 18 %."""
    rng = np.random.default_rng(0)
    refused = []
    for _ in range(300):
        labels = (rng.random(count) < 0.01).astype(np.int64)
        if not labels.any():
            continue
        score = rng.normal(size=count) + separation * labels
        logits = np.stack([np.zeros(count), separation * score - separation**2 / 2 - np.log(99)], 1)
        refused.append(not is_associated(logits, labels if belong else rng.permutation(labels)))
    assert fewest <= np.mean(refused) <= most


def test_the_smallest_of_few_scores_is_not_clipped() -> None:
    logits = np.random.default_rng(1).standard_normal((49, 2))
    labels = (logits[:, 1] > logits[:, 0]).astype(np.int64)
    assert "clipped_values" not in codes(warnings_of(logits, labels))
    clipped = np.maximum(logits, np.quantile(logits, 0.1))
    assert "clipped_values" in codes(warnings_of(clipped, labels))


def test_neither_offsets_nor_equal_numbers_nor_classes_absent_by_chance_are_a_warning() -> None:
    """The logits expect the equal numbers; 200 classes have 3 samples on average."""
    logits, labels = drawn(2000)
    assert warnings_of(logits + np.random.default_rng(0).normal(size=10), labels) == []
    for temperature in (0.5, 1.0, 4.0):
        logits, labels = by_class(*drawn(2000, 2, temperature=temperature))
        assert warnings_of(logits - np.log([1.0 - RARE, RARE]), labels) == []
    logits, labels = drawn(600, 200)
    assert len(np.unique(labels)) < 200
    assert warnings_of(logits, labels) == []


@pytest.mark.parametrize("rows", [[[0.0, 3.0]], [[0.0, 0.0]], [[3e38, -3e38]], [[1e9, 0.0], [0.0, 1e9]]])
def test_extreme_logits_of_two_classes_are_no_draw_by_class(rows: list[list[float]]) -> None:
    logits = np.tile(np.array(rows), (200 // len(rows), 1))
    for labels in (
        np.arange(200) % 2,
        np.arange(200) // 100,
        (logits.argmax(axis=1) + np.arange(200) // 99) % 2,
    ):
        assert "class_mix" not in codes(warnings_of(logits, labels.astype(np.int64)))


def test_weights_may_give_the_classes_their_numbers() -> None:
    logits, labels = by_class(*drawn(1000, 2))
    whole = check_validation_set(logits, labels)
    weighted = check_validation_set(logits, labels, sample_weight=np.array([0.95, 0.05])[labels])
    for method in ("auto", "ts"):
        assert codes(check_fit(method, whole)) == ["class_mix"]
        assert codes(check_fit(method, weighted)) == []


def test_weights_that_leave_few_samples_are_not_for_the_gate() -> None:
    """Weights 1 of n samples and w of the others count like (n + (N - n) w)^2 / (n + (N - n) w^2)."""
    logits, labels = drawn(300, 3)
    for large, effective in ((15, 15.9), (30, 30.8)):
        weights = np.where(np.arange(300) < large, 1.0, 0.0015)
        data = check_validation_set(logits, labels, sample_weight=weights)
        assert data.effective == pytest.approx(effective, abs=0.1)
        found = {one.code: one for one in check_fit("auto", data)}
        assert set(found) == ({"few_effective"} if large == 15 else set())
    message = "300 weighted samples count like 15.9 of one weight: fewer than 20 show little"
    weights = np.where(np.arange(300) < 3, 30.0, 1.0)  # 387 x 2,997 / 81,297 is 14.3
    (few,) = check_fit("auto", check_validation_set(logits, labels, sample_weight=weights))
    assert (few.severity, few.message) == (
        "serious",
        "300 weighted samples count like 50.0 of one weight, and the largest weight is 8% of all; the largest"
        " weights decide",
    )
    weights = np.where(np.arange(300) < 15, 1.0, 0.0015)
    (warning,) = check_fit("auto", check_validation_set(logits, labels, sample_weight=weights))
    assert (warning.severity, warning.message.startswith(message)) == ("serious", True)


@pytest.mark.parametrize("each", [2, 3, 10])
@pytest.mark.parametrize(("count", "classes"), [(120, 10), (1200, 10), (1200, 100), (9000, 10)])
def test_near_copies_need_a_group(count: int, classes: int, each: int) -> None:
    logits, labels, sample = variants(count, classes, each)
    found = {one.code: one.severity for one in warnings_of(logits, labels)}
    assert found["near_copies"] == "serious"
    named = check_validation_set(logits, labels, groups=sample)
    assert "near_copies" not in codes(check_fit("auto", named))
    shared, significance = shared_residuals(logits, labels, None)
    assert shared == pytest.approx(1.0, abs=0.1)
    assert significance > 6.0
    assert abs(shared_residuals(logits, labels, named.units)[0]) < 0.2


def test_near_copies_are_told_from_a_model_that_is_wrong_in_places() -> None:
    """Which shares its residual with all rows near by; and half as many copies share half as much."""
    logits, labels = drawn(2000, 10)
    wrong = logits + np.where(logits[:, :1] > logits[:, 1:2], 4.0, -4.0) * np.eye(10)[3]
    assert abs(shared_residuals(wrong, labels, None)[0]) < 0.1
    copied, own, _ = variants(1000, 10, 2)
    shared, _ = shared_residuals(np.r_[logits[1000:], copied], np.r_[labels[1000:], own], None)
    assert shared == pytest.approx(0.5, abs=0.1)


def test_the_nearest_rows_are_those_of_all_distances() -> None:
    """Of more rows than are compared at once, and of pairs of rows, of which a row has no other."""
    places = np.random.default_rng(0).normal(size=(9000, 3)).astype(np.float32)
    asked, pairs = np.arange(0, 9000, 90), np.arange(9000) // 2
    found, apart = _nearest(places, asked, None), _nearest(places, asked, pairs)
    for row, own, other in zip(asked, found, apart, strict=True):
        distances = ((places - places[row]) ** 2).sum(axis=1)
        distances[row] = np.inf
        assert distances[own] == pytest.approx(np.sort(distances)[:30], abs=1e-4)
        distances[row + 1] = np.inf
        assert distances[other] == pytest.approx(np.sort(distances)[:30], abs=1e-4)


def test_some_near_copies_and_chance_in_small_sets_are_no_fault() -> None:
    """A fourth of the rows share all, surely; and of 64 independent rows the share is anything."""
    logits, labels = drawn(3000, 10)
    copied, own, _ = variants(1000, 10, 2)
    mixed = np.r_[logits[1000:], copied[:700]], np.r_[labels[1000:], own[:700]]
    shared, significance = shared_residuals(*mixed, None)
    assert shared == pytest.approx(0.26, abs=0.05)
    assert significance > 6.0
    assert "near_copies" not in codes(warnings_of(*mixed))
    sets = [drawn(64, 2, seed=seed) for seed in range(60)]
    assert max(shared_residuals(*one, None)[0] for one in sets) > 0.4
    assert not any("near_copies" in codes(warnings_of(*one)) for one in sets)


def test_folds_are_of_one_size_with_random_class_frequencies() -> None:
    data = check_validation_set(*drawn(1000, 4))
    counts = np.array([np.bincount(data.labels[mask], minlength=4) for mask in fold_masks(data, 5, 0)])
    assert (counts.sum(axis=1) == 200).all()
    assert counts.std(axis=0).mean() == pytest.approx(math.sqrt(200 * 3 / 16), rel=0.5)


@pytest.mark.parametrize(("classes", "decimals"), [(2, 2), (2, 4), (3, 3), (5, 2), (5, 3), (10, 2), (50, 2)])
def test_equal_rows_of_rounded_probabilities_are_no_copies(classes: int, decimals: int) -> None:
    logits, labels = drawn(3000, classes)
    rounded = np.maximum(softmax(logits).round(decimals), 10.0**-decimals / 2)
    scores = np.log(rounded / rounded.sum(axis=1, keepdims=True))
    assert len(np.unique(scores, axis=0)) < 2990
    assert "duplicates" not in codes(warnings_of(scores, labels))


@pytest.mark.parametrize("trees", [10, 100])
@pytest.mark.parametrize("classes", [2, 10, 50])
def test_equal_votes_are_no_copies(classes: int, trees: int) -> None:
    logits, labels = drawn(3000, classes)
    scores = np.log(np.random.default_rng(1).multinomial(trees, softmax(logits)) + 0.1)
    assert "duplicates" not in codes(warnings_of(scores, labels))
    assert len(np.unique(RowStatistics.of(scores, labels).copies)) == 3000


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_copies_are_found_even_where_a_few_have_another_label(classes: int) -> None:
    logits, labels = drawn(3000, classes)
    again = np.r_[0:3000, 0:300]
    copied = labels[again]
    copied[3000:3015] = 0
    (found,) = (one for one in warnings_of(logits[again], copied) if one.code == "duplicates")
    assert (found.severity, found.rows) == ("warning", 300)


def test_copies_within_a_declared_group_are_no_fault() -> None:
    logits, labels = drawn(3000, 10)
    again = np.r_[0:3000, 0:3000]
    assert "duplicates" not in codes(warnings_of(logits[again], labels[again], groups=again))
    other = np.r_[0:3000, 0:2000, 3000:4000]  # 1,000 copies belong to other groups than their originals
    (found,) = (w for w in warnings_of(logits[again], labels[again], groups=other) if w.code == "duplicates")
    assert found.rows == 1000


def test_copies_share_a_fold_also_where_their_other_logits_are_none() -> None:
    data = check_validation_set(*repeated(*drawn(60)))
    folds = fold_masks(data, 5, 0)
    masks = [mask.reshape(10, 60) for mask in folds]
    assert all((mask == mask[:1]).all() for mask in masks)
    assert [int(mask[0].sum()) for mask in masks] == [12] * 5
    others = fold_masks(data.with_logits(np.arange(600)[:, None] * data.logits), 5, 0)
    assert all((mask == own).all() for mask, own in zip(others, folds, strict=True))


def test_a_fit_is_never_judged_on_a_copy_of_what_it_saw() -> None:
    """Cross-fitted answers to ten copies of a set are those of a set whose folds are the same."""
    logits, labels = repeated(*drawn(60))
    answers = cross_fit("vector", check_validation_set(logits, labels)).probabilities.reshape(10, 60, 10)
    assert (answers == answers[0]).all()
    own = answers[0][np.arange(60), labels[:60]]
    alone = cross_fit("vector", check_validation_set(*drawn(60))).probabilities[np.arange(60), labels[:60]]
    assert -np.log(own).mean() > -np.log(alone).mean() - 0.5


def test_there_are_no_more_folds_than_distinct_rows() -> None:
    logits, labels = drawn(2)
    data = check_validation_set(np.tile(logits, (10, 1)), np.tile(labels, 10))
    assert len(fold_masks(data, 5, 0)) == 2
    assert cross_fit("ts", data).probabilities.shape == (20, 10)
    for count in (2, 30):  # rows that are all equal are no copies
        equal = check_validation_set(np.ones((count, 3)), np.arange(count) % 3)
        assert len(fold_masks(equal, 5, 0)) == min(count, 5)


def test_parameters_per_class_without_data_are_refused() -> None:
    data, whole = check_validation_set(*without_class(*drawn())), check_validation_set(*drawn())
    assert "no_data_for_class" in codes(check_fit("vector", data))
    assert "no_data_for_class" not in codes(check_fit("ts+pb", data)) + codes(check_fit("vector", whole))


@pytest.mark.parametrize(
    ("method", "severity"),
    [*((name, "serious") for name in ("vector", "sms", "dirichlet")), ("ts", "warning"), ("auto", "warning")],
)
@pytest.mark.parametrize("few", [1, 10, 24, 25])
def test_the_gate_refuses_parameters_of_a_rare_class(method: str, severity: str, few: int) -> None:
    found = check_fit(method, check_validation_set(*rare_class(*drawn(3000), few)))
    assert [(one.code, one.severity, one.rows) for one in found] == (
        [("rare_classes", severity, few)] if few < 25 else []
    )


def test_more_parameters_than_samples_are_told() -> None:
    data = check_validation_set(*drawn(100, 60))
    (few,) = (one for one in check_fit("vector", data) if one.code == "few_samples")
    assert "100 samples are few for `vector`, which has 120 parameters" in few.message
    assert "few_samples" not in codes(check_fit("ts", data))


@pytest.mark.parametrize(
    ("method", "parameters", "per_class", "network"),
    [
        ("uncalibrated", 0, False, False),
        ("ts", 1, False, False),
        ("pb-lower", 1, False, False),
        ("ts+pb", 3, False, False),
        ("vector", 20, True, False),
        ("isotonic", 150, True, False),
        ("ts+pb-mlp", 98, False, True),
    ],
)
def test_parameters_are_counted(method: str, parameters: int, per_class: bool, network: bool) -> None:
    one = parse(method)
    assert (one.num_parameters(10), one.is_per_class, one.is_network) == (parameters, per_class, network)


def test_many_changed_labels_are_told_unless_they_are_right() -> None:
    assert check_changed(10, 100, 1.0, 0.0) == []
    assert check_changed(60, 100, 0.0, 1.0) == []
    (warning,) = check_changed(60, 100, 1.0, 0.0)
    assert "changes 60 of 100 predicted labels" in warning.message


@pytest.mark.parametrize("values", [51, 1000, 4000])
def test_rows_of_few_values_are_not_known_because_they_occurred_before(values: int) -> None:
    """As those of a forest, whose rows are counts of trees."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(values, 2))
    fitted, others = (Sketch.of(rows[rng.integers(0, values, 2000)]) for _ in range(2))
    assert check_known(others, fitted, "it was", "it seems better") == []


def test_rows_that_are_known_are_found_where_some_are_repeated() -> None:
    rows = np.random.default_rng(0).normal(size=(2000, 2))
    rows[:600] = rows[600:1200]
    sketch = Sketch.of(rows)
    assert sketch.repeated == pytest.approx(0.3, abs=0.1)  # of 256 hashes
    assert codes(check_known(sketch, sketch, "it was", "it seems better")) == ["known_rows"]


def test_a_sketch_tells_how_many_rows_are_known() -> None:
    logits, other = drawn(2000)[0], drawn(1000, seed=1)[0]
    known = Sketch.read(Sketch.of(logits).to_dict())
    for rows in (
        logits.astype(np.float32).astype(np.float64),
        logits[:900],
        np.concatenate([logits[:1500], other[:500]]),
    ):
        assert codes(check_known(Sketch.of(rows), known, "it was", "it seems better")) == ["known_rows"]
    for rows in (np.concatenate([logits[:300], other[:700]]), other):
        assert check_known(Sketch.of(rows), known, "it was", "it seems better") == []


def codes(warnings: list[DataWarning]) -> list[str]:
    return [warning.code for warning in warnings]
