"""Samples of one patient or video: one fold for all of them, and intervals that know of the groups."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from boxcal.calibrators.array_ops import softmax
from boxcal.calibrators.data import check_validation_set, fold_masks
from boxcal.calibrators.evaluation.bootstrap import Resamples, mean_estimates
from boxcal.calibrators.evaluation.evaluate import judge
from boxcal.calibrators.evaluation.outcomes import outcomes
from boxcal.calibrators.evaluation.report import cross_fitted_report, reliability_of
from boxcal.calibrators.evaluation.two_classes import event_calibration

RNG = np.random.default_rng(3)
LOGITS = RNG.normal(size=(120, 4)) * 2
LABELS = LOGITS.argmax(1)
PATIENTS = np.array([f"patient {n // 4}" for n in range(120)])


def test_a_group_is_in_one_fold() -> None:
    copied = LOGITS.copy()
    copied[0], copied[5] = copied[100], copied[9]  # copies join the groups of 0 and 100
    data = check_validation_set(copied, copied.argmax(1), groups=PATIENTS)
    masks = fold_masks(data, 5, 0)
    assert len(masks) == 5
    assert (np.stack(masks).sum(axis=0) == 1).all()
    for mask in masks:
        inside = {str(name) for name in PATIENTS[mask]}
        assert inside.isdisjoint(PATIENTS[~mask])
        assert ("patient 0" in inside) == ("patient 25" in inside)


def test_resamples_of_groups_of_any_size_have_as_many_samples() -> None:
    (weights,) = Resamples(6, draws=50, groups=np.array([0, 0, 0, 1, 1, 2])).blocks()
    np.testing.assert_allclose(weights.sum(axis=0), np.full(50, 6.0))
    np.testing.assert_array_equal(weights[0], weights[2])
    assert len(np.unique(weights[5])) > 2


@pytest.mark.parametrize(
    "column",
    [
        PATIENTS.astype(object),
        pd.Series(PATIENTS),
        pd.Series(PATIENTS, dtype="category"),
        pd.Series(pd.date_range("2026-01-01", periods=30).repeat(4)),
        torch.arange(30).repeat_interleave(4),
    ],
)
def test_groups_are_a_column_of_any_kind(column: Any) -> None:
    expected = check_validation_set(LOGITS, LABELS, groups=PATIENTS).groups
    found = check_validation_set(LOGITS, LABELS, groups=column).groups
    assert expected is not None
    assert found is not None
    assert len(np.unique(np.stack([expected, found]), axis=1).T) == 30


def test_groups_of_single_samples_change_nothing() -> None:
    alone = cross_fitted_report("ts", LOGITS, LABELS, groups=np.arange(120)).to_dict()
    without = cross_fitted_report("ts", LOGITS, LABELS).to_dict()
    for name in ("nll", "brier", "smooth_ece"):
        for column in ("before", "after", "difference"):
            for member, value in without["metrics"][name][column].items():
                assert alone["metrics"][name][column][member] == pytest.approx(value, abs=1e-12)


def test_copies_of_samples_do_not_narrow_an_interval() -> None:
    probabilities = torch.softmax(torch.from_numpy(LOGITS), dim=1)
    labels = torch.from_numpy(RNG.integers(0, 4, 120))
    once = judge(outcomes(probabilities, labels)).estimates
    times = 9
    nine, same = probabilities.repeat_interleave(times, dim=0), labels.repeat_interleave(times)
    groups = np.arange(120).repeat(times)
    known = judge(outcomes(nine, same, groups=groups)).estimates
    unknown = judge(outcomes(nine, same)).estimates
    for name in ("nll", "brier", "error_rate"):
        width = once[name].high - once[name].low
        assert known[name].value == pytest.approx(once[name].value)
        assert known[name].high - known[name].low == pytest.approx(width, rel=0.05)
        assert unknown[name].high - unknown[name].low == pytest.approx(width / 3, rel=0.1)


def test_a_report_counts_copies_as_one_sample() -> None:
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(200, 4)) * 2
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    once = cross_fitted_report("uncalibrated", logits, labels).before.estimates["nll"]
    nine = cross_fitted_report("uncalibrated", np.tile(logits, (9, 1)), np.tile(labels, 9)).before.estimates
    assert nine["nll"].value == pytest.approx(once.value)
    assert nine["nll"].high - nine["nll"].low == pytest.approx(once.high - once.low)


def test_intervals_cover_the_mean_of_groups_of_any_size() -> None:
    rng = np.random.default_rng(1)
    inside = 0
    for trial in range(200):
        sizes = rng.integers(1, 12, 40)
        groups = np.repeat(np.arange(40), sizes)
        values = rng.normal(size=40)[groups] + 0.3 * rng.normal(size=len(groups))
        (found,) = mean_estimates(
            values[:, None], Resamples(len(values), draws=200, seed=trial, groups=groups)
        )
        inside += found.low <= 0.0 <= found.high
    assert inside >= 180  # 95 % of 200 are 190; without groups it is about 100


@pytest.mark.parametrize("num_classes", [2, 10])
def test_copies_count_as_one_sample_in_every_interval(num_classes: int) -> None:
    rng = np.random.default_rng(1)
    logits = 2 * rng.normal(size=(300, num_classes))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    rows = softmax(1.5 * logits)
    groups = np.repeat(np.arange(300), 4)
    once = judge(outcomes(rows, labels))
    often = judge(outcomes(np.repeat(rows, 4, axis=0), np.repeat(labels, 4), None, groups))
    for name, one in once.estimates.items():
        # The labels that the rows imply, which limit a variance from below, are drawn for each copy.
        most = 0.07 if name == "brier_refinement" else 1e-5
        assert (often.estimates[name].low, often.estimates[name].high) == pytest.approx(
            (one.low, one.high), rel=most, abs=1e-12
        ), name
    bins = [reliability_of(side, side, 0)["before"]["bins"] for side in (once, often)]
    for side, found in zip((once, often), bins, strict=True):
        if (events := event_calibration(side.scored)) is not None:
            found.extend(events.curve["bins"])
    for one_bin, other in zip(*bins, strict=True):
        assert other.pop("count") == 4 * one_bin.pop("count")
        assert other == pytest.approx(one_bin)
