"""Streaming metrics, drift, expected accuracy and class frequencies against their definitions."""

import math

import numpy as np
import pytest

from boxcal.calibrators.evaluation.metrics import evaluate
from boxcal.calibrators.monitoring.accuracy import Accuracy
from boxcal.calibrators.monitoring.class_prior import estimate_class_prior, is_shifted
from boxcal.calibrators.monitoring.drift import DriftTest
from boxcal.calibrators.monitoring.metrics import RunningMetrics
from boxcal.calibrators.monitoring.state import Array
from tests.calibrators.monitoring.streams import answers, drawn, normalised


def test_streamed_metrics_agree_with_those_of_the_whole() -> None:
    random = np.random.default_rng(0)
    rows = answers(random, 3000)
    labels = drawn(rows, random)
    metrics = RunningMetrics(10)
    for first in range(0, 3000, 700):
        metrics.update(rows[first : first + 700], labels[first : first + 700])
    result, whole = metrics.result(), evaluate(rows, labels)
    assert result.count == 3000
    assert result.error_rate == pytest.approx(whole.error_rate, rel=1e-12)
    assert result.brier == pytest.approx(whole.brier, rel=1e-12)
    assert result.nll == pytest.approx(whole.nll, rel=1e-3)
    assert result.ece == pytest.approx(whole.ece_width, rel=1e-9)
    assert result.nll_low < result.nll < result.nll_high
    assert math.isnan(RunningMetrics(10).result().nll)


def test_the_interval_of_the_nll_covers_at_every_time() -> None:
    """Of 100 streams at most 5 should ever miss; 11 or more have a probability below .02 at that rate."""
    random = np.random.default_rng(1)
    population = answers(random, 2000)
    floored = (1 - 1e-4) * population + 1e-4 / 10
    truth = -(population * np.log(floored)).sum(1).mean()
    missed = 0
    for _ in range(100):
        rows = population[random.integers(0, 2000, 1500)]
        metrics = RunningMetrics(10)
        metrics.update(rows, drawn(rows, random))
        missed += not metrics.result().nll_low <= truth <= metrics.result().nll_high
    assert missed <= 10


def test_ece_of_calibrated_answers_is_what_it_says_it_would_be() -> None:
    random = np.random.default_rng(2)
    seen, said = [], []
    for _ in range(50):
        rows = answers(random, 2000)
        metrics = RunningMetrics(10)
        metrics.update(rows, drawn(rows, random))
        seen.append(metrics.result().ece)
        said.append(metrics.result().ece_if_calibrated)
    assert np.mean(seen) == pytest.approx(np.mean(said), rel=0.1)


def test_drift_is_found_where_inputs_change_and_seldom_where_not() -> None:
    alarms = 0
    for seed in range(60):
        random = np.random.default_rng(seed)
        test = DriftTest(answers(random, 2000).max(1))
        test.update(answers(random, 2000).max(1))
        alarms += test.alarm
        test.update(answers(random, 1500, scale=1.0).max(1))
        assert test.alarm
    assert alarms <= 3


def test_drift_continues_to_the_last_bit() -> None:
    random = np.random.default_rng(3)
    reference, seen = answers(random, 500).max(1), answers(random, 400).max(1)
    whole, first, second = DriftTest(reference), DriftTest(reference), DriftTest(reference)
    expected = whole.update(seen)
    got = first.update(seen[:123])
    second.load_state_dict(first.state_dict())
    assert np.array_equal(np.concatenate([got, second.update(seen[123:])]), expected)
    assert second.log_evidence == whole.log_evidence


@pytest.mark.parametrize("power", [1.0, 0.5])
def test_the_interval_of_the_accuracy_covers_whatever_changed(power: float) -> None:
    """95 % are promised from 200 labels; of 200 windows, 22 or more misses have a probability below .001."""
    random = np.random.default_rng(4)
    population = answers(random, 4000)
    law = normalised(population**power)
    truth = law[np.arange(4000), population.argmax(1)].mean()
    missed = 0
    for _ in range(200):
        index = random.integers(0, 4000, 2000)
        rows, labels = population[index], drawn(law[index], random)
        accuracy = Accuracy()
        accuracy.predicted(rows.max(1))
        accuracy.labelled(rows[:200].max(1), rows[:200].argmax(1) == labels[:200])
        result = accuracy.result()
        assert result is not None
        assert result.basis == "labels"
        assert result.low is not None
        assert result.high is not None
        missed += not result.low <= truth <= result.high
    assert missed <= 21


def test_without_labels_the_accuracy_rests_on_the_validation_data() -> None:
    accuracy = Accuracy(validation_gap=-0.05)
    assert accuracy.result() is None
    accuracy.predicted(np.array([0.9, 0.7]))
    result = accuracy.result()
    assert result is not None
    assert result.value == pytest.approx(0.75)
    assert (result.basis, result.low, result.high) == ("validation", None, None)


def test_class_frequencies_of_shifted_traffic_are_found() -> None:
    random = np.random.default_rng(5)
    pool = answers(random, 20_000, scale=6.0)
    source, factors = pool.mean(0), np.array([5.0, 0.2] + [1.0] * 8)
    weights = (pool * factors).sum(1)
    rows = pool[random.choice(len(pool), 5000, p=weights / weights.sum())]
    truth = normalised(rows * factors).mean(0)
    found = estimate_class_prior(rows, source)
    assert found.sum() == pytest.approx(1.0)
    assert np.abs(found - truth).max() < 0.02 < np.abs(source - truth).max()
    unshifted = estimate_class_prior(pool, source)
    assert np.abs(unshifted - source).max() < 0.01


@pytest.mark.parametrize("source_rows", [math.inf, 2000.0, 300.0])
def test_a_shift_is_told_at_its_level(source_rows: float) -> None:
    random = np.random.default_rng(5)
    pool = answers(random, 20_000, scale=6.0)
    few = 20_000 if source_rows == math.inf else int(source_rows)

    def told(weights: Array) -> int:
        return sum(
            is_shifted(
                pool[random.choice(20_000, 1000, p=weights / weights.sum())],
                pool.mean(0) if few == 20_000 else pool[random.choice(20_000, few)].mean(0),
                source_rows,
            )
            for _ in range(200)
        )

    assert told(np.ones(20_000)) <= 6  # more have a probability below .005
    assert told((pool * np.array([4.0, 0.25] + [1.0] * 8)).sum(1)) >= 195


def test_too_few_rows_give_no_class_frequencies() -> None:
    with pytest.raises(ValueError, match="at least 1,000 rows, not 999"):
        estimate_class_prior(np.full((999, 2), 0.5), np.ones(2))
    with pytest.raises(ValueError, match="do not fit"):
        estimate_class_prior(np.full((1000, 2), 0.5), np.ones(3))
