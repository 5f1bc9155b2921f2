"""The table of methods: fitted, judged, marked and written."""

import csv
import io
import json

import numpy as np
import pytest
import torch

from boxcal.calibrators import evaluate, fit, methods
from boxcal.calibrators.data import ValidationSet, check_validation_set
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.evaluation.comparison import (
    METRICS,
    MethodComparison,
    base_of,
    compare_methods,
    markdown,
    to_csv,
)
from tests.calibrators.samples import sharpened


def data(count: int, seed: int, sharpness: float = 2.5, classes: int = 4) -> ValidationSet:
    return check_validation_set(*sharpened(count, classes, sharpness, seed))


@pytest.fixture(scope="module")
def comparison() -> MethodComparison:
    return compare_methods(["pb", "ts+pb", "fc", "pb-upper"], data(250, 1), data(300, 2))


def test_bases_come_along_the_unfit_are_named_and_files_hold_the_numbers(
    comparison: MethodComparison,
) -> None:
    assert [row.method for row in comparison.rows] == ["uncalibrated", "pb", "ts", "ts+pb", "pb-upper"]
    assert [row.base for row in comparison.rows] == ["", "uncalibrated", "uncalibrated", "ts", "uncalibrated"]
    assert list(comparison.left_out) == ["fc"]
    assert "features" in comparison.left_out["fc"]
    assert {base_of(name) for name in methods()} <= {"", *methods()}
    assert base_of("mix+ts") == "ts"
    rows = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    assert len(rows) == 5 * len(METRICS)
    document = json.loads(json.dumps(comparison.to_dict(), allow_nan=False))
    first = document["methods"][0]["metrics"]["nll"]
    assert float(rows[list(METRICS).index("nll")]["value"]) == first["value"]
    assert first["change"] is None
    assert document["methods"][3]["metrics"]["nll"]["change"]["low"] <= 0


def test_a_method_that_does_not_take_so_many_classes_is_named() -> None:
    found = compare_methods(["ts", "polynomial"], data(200, 1, classes=41), data(100, 2, classes=41), folds=2)
    assert [row.method for row in found.rows] == ["uncalibrated", "ts"]
    assert found.left_out.keys() == {"polynomial"}
    assert "at most 40, not 41" in found.left_out["polynomial"]


def test_values_are_those_of_a_fit_and_improvements_are_marked(comparison: MethodComparison) -> None:
    validation, test = data(250, 1), data(300, 2)
    calibrator = fit("ts", validation.scores, validation.labels).on_arrays
    expected = evaluate(calibrator(test.scores), test.labels)
    row = next(row for row in comparison.rows if row.method == "ts")
    for metric in METRICS:
        assert row.scores[metric].value == pytest.approx(getattr(expected, metric))
    assert row.changed_labels == 0
    assert row.scores["nll"].improves
    assert row.scores["nll"].is_clear
    assert row.scores["error_rate"].improves is None
    lines = {line.split("`")[1]: line for line in markdown(comparison).splitlines()[2:]}
    assert "▼*" in lines["ts"]
    assert "▼" not in lines["uncalibrated"]
    assert "**" in lines["ts"] + lines["ts+pb"]


def test_standard_errors_are_those_of_repeated_experiments() -> None:
    """The jackknife's standard error against the spread over fresh validation and test sets."""
    found = []
    for seed in range(60):
        validation, test = data(300, seed), data(300, 1000 + seed)
        metrics = evaluate(
            fit("ts", validation.scores, validation.labels).on_arrays(test.scores), test.labels
        )
        found.append([metrics.nll, metrics.error_rate])
    claimed = []
    for seed in range(4):
        row = compare_methods(["ts"], data(300, seed), data(300, 1000 + seed)).rows[1]
        claimed.append([row.scores["nll"].standard_error, row.scores["error_rate"].standard_error])
    assert np.mean(claimed, axis=0) == pytest.approx(np.std(found, axis=0), rel=0.4)


def test_four_copies_of_every_sample_leave_standard_errors_as_they_are() -> None:
    alone = data(300, 1)
    copied = check_validation_set(np.tile(alone.logits, (4, 1)), np.tile(alone.labels, 4))
    grouped = check_validation_set(
        copied.logits + np.arange(1200)[:, None] * 1e-9, copied.labels, groups=np.tile(np.arange(300), 4)
    )
    errors = [
        np.mean(
            [compare_methods([], one, seed=seed).rows[0].scores["nll"].standard_error for seed in range(8)]
        )
        for one in (alone, copied, grouped)
    ]
    assert errors == pytest.approx([errors[0]] * 3, rel=0.25)  # half as large if they were independent


def test_without_a_test_set_methods_are_cross_fitted() -> None:
    found = compare_methods(["ts"], data(300, 3))
    assert found.test_samples == 0
    nll = [row.scores["nll"] for row in found.rows]
    assert nll[1].value < nll[0].value
    assert all(score.standard_error > 0 for score in nll)


def test_calibrators_are_judged_as_they_are_and_compared_with_one_of_them() -> None:
    fitted_to, others = data(250, 1), data(300, 2)
    calibrators = {name: fit(name, fitted_to.scores, fitted_to.labels).on_arrays for name in ("ts", "pb")}
    named = {f"version of {name}": calibrator for name, calibrator in calibrators.items()}
    found = compare_methods([], others, calibrators=named, reference="version of ts")
    assert [(row.method, row.base) for row in found.rows] == [
        ("uncalibrated", ""), ("version of ts", "uncalibrated"), ("version of pb", "version of ts"),
    ]  # fmt: skip
    for row, calibrator in zip(found.rows[1:], calibrators.values(), strict=True):
        expected = evaluate(calibrator(others.scores), others.labels)
        assert row.scores["nll"].value == pytest.approx(expected.nll)
    change = found.rows[2].scores["nll"].change
    assert change is not None
    assert change.value == pytest.approx(
        found.rows[2].scores["nll"].value - found.rows[1].scores["nll"].value
    )


def test_refusals() -> None:
    with pytest.raises(InvalidDataError, match="4 classes, the test set 3"):
        compare_methods(["ts"], data(30, 0), data(30, 0, classes=3))
    with pytest.raises(InvalidDataError, match="folds must be 2 to 30"):
        compare_methods(["ts"], data(40, 0), data(30, 0), folds=31)


def test_probability_zero_gives_an_infinite_nll_and_a_document_all_the_same() -> None:
    certain = check_validation_set(
        torch.tensor([[900.0, 0.0], [900.0, 0.0], [0.0, 900.0], [900.0, 0.0]]), [0, 0, 1, 1]
    )
    found = compare_methods([], certain, certain, folds=2)
    assert found.rows[0].scores["nll"].value == np.inf
    assert "infinite" in markdown(found)
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert document["methods"][0]["metrics"]["nll"]["value"] is None
