"""Streaming metrics, drift, accuracy, class frequencies; which rows are read, and how logits are kept."""

import math

import numpy as np
import pytest
from scipy import special

from boxcal.calibrators.evaluation.metrics import evaluate
from boxcal.calibrators.monitoring.class_prior import estimate_class_prior, is_shifted
from boxcal.calibrators.monitoring.drift import PER_SECOND, RESERVE, DriftTest, TrafficSample
from boxcal.calibrators.monitoring.metrics import Accuracy, RunningMetrics, deviation_bound
from boxcal.calibrators.monitoring.state import Array
from boxcal.calibrators.monitoring.stored_logits import pack, unpack
from tests.calibrators.monitoring.streams import answers, drawn, normalised, shifted
from tests.calibrators.samples import softmax


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


def test_the_bound_of_the_nll_is_the_gamma_exponential_mixture() -> None:
    """The supermartingale of Howard et al. (2021), with SciPy's incomplete gamma function, is 40 there."""
    for variance in (0.3, 2.0, 30.0, 1000.0):
        bound = deviation_bound(variance, math.log(40.0))
        shape, scale = variance + 2.0, variance + 2.0 + bound
        mixture = 2.0 * math.log(2.0) - math.log(special.gammainc(2.0, 2.0)) + special.gammaln(shape)
        mixture += math.log(special.gammainc(shape, scale)) - shape * math.log(scale) + variance + bound
        assert mixture == pytest.approx(math.log(40.0), abs=0.05)
        assert mixture >= math.log(40.0)  # what stands for the function is a lower bound of it


def test_the_interval_of_the_nll_covers_at_every_time() -> None:
    """Of 100 streams at most 5 should ever miss; 11 or more have a probability below .02 at that rate.

    The answers become too confident after half of the labels, and what is covered is the mean so far.
    """
    random = np.random.default_rng(1)
    population = answers(random, 2000)
    later = population**2 / (population**2).sum(1, keepdims=True)
    expected = [-(population * np.log((1 - 1e-4) * p + 1e-4 / 10)).sum(1).mean() for p in (population, later)]
    missed, widths = 0, []
    for _ in range(100):
        rows = random.integers(0, 2000, 1500)
        labels = drawn(population[rows], random)
        metrics, ever = RunningMetrics(10), False
        for first in range(0, 1500, 50):
            chosen = (population if first < 750 else later)[rows[first : first + 50]]
            metrics.update(chosen, labels[first : first + 50])
            share = max(0, first + 50 - 750) / (first + 50)
            truth = (1.0 - share) * expected[0] + share * expected[1]
            found = metrics.result()
            assert found.nll_low < found.nll < found.nll_high
            ever |= not found.nll_low <= truth <= found.nll_high
        missed += ever
        widths.append(found.nll_high - found.nll_low)
    assert missed <= 10
    assert np.mean(widths) < 0.33


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


@pytest.mark.parametrize(
    ("confidence", "truth", "labels"), [(0.9999, 0.98, 50), (0.995, 0.985, 100), (0.995, 0.985, 200)]
)
def test_the_interval_covers_the_accuracy_of_a_model_that_is_too_sure(
    confidence: float, truth: float, labels: int
) -> None:
    """A third of 50 such labels has no error: .64, .79 and .81 were covered. 22 misses are rare, as above."""
    random = np.random.default_rng(7)
    missed = 0
    for _ in range(200):
        accuracy = Accuracy()
        accuracy.predicted(np.full(2000, confidence))
        accuracy.labelled(np.full(labels, confidence), random.random(labels) < truth)
        result = accuracy.result()
        assert result is not None
        assert result.low is not None
        assert result.high is not None
        missed += not result.low <= truth <= result.high
    assert missed <= 21


def test_fifty_right_answers_do_not_prove_that_all_are() -> None:
    accuracy = Accuracy()
    accuracy.predicted(np.full(1000, 1.0))
    accuracy.labelled(np.full(50, 1.0), np.full(50, True))
    result = accuracy.result()
    assert result is not None
    # 1 - 1.96 sqrt(2 / 50 / 50)
    assert (result.value, result.high) == (1.0, 1.0)
    assert result.low == pytest.approx(0.94456, abs=1e-5)


def test_without_labels_the_accuracy_rests_on_the_validation_data() -> None:
    accuracy = Accuracy(validation_gap=-0.05)
    assert accuracy.result() is None
    accuracy.predicted(np.array([0.9, 0.7]))
    result = accuracy.result()
    assert result is not None
    assert result.value == pytest.approx(0.75)
    assert (result.basis, result.low, result.high) == ("validation", None, None)


def test_class_frequencies_of_shifted_traffic_are_found_where_there_are_1_000_rows() -> None:
    random = np.random.default_rng(5)
    pool = answers(random, 20_000, scale=6.0)
    source, factors = pool.mean(0), np.array([5.0, 0.2] + [1.0] * 8)
    rows = shifted(random, pool, 5000, factors)
    truth = normalised(rows * factors).mean(0)
    found = estimate_class_prior(rows, source)
    assert found.sum() == pytest.approx(1.0)
    assert np.abs(found - truth).max() < 0.02 < np.abs(source - truth).max()
    unshifted = estimate_class_prior(pool, source)
    assert np.abs(unshifted - source).max() < 0.01
    never_seen = estimate_class_prior(np.tile([0.0, 0.0, 1.0], (1000, 1)), np.array([0.5, 0.5, 0.0]))
    assert never_seen == pytest.approx([7.5 / 1015, 7.5 / 1015, 1000 / 1015], rel=1e-4)
    with pytest.raises(ValueError, match="at least 1,000 rows, not 999"):
        estimate_class_prior(np.full((999, 2), 0.5), np.ones(2))
    with pytest.raises(ValueError, match="do not fit"):
        estimate_class_prior(np.full((1000, 2), 0.5), np.ones(3))


@pytest.mark.parametrize("source_rows", [pytest.param(math.inf, marks=pytest.mark.long), 300.0])
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
            for _ in range(100)
        )

    assert told(np.ones(20_000)) <= 4  # more have a probability below .005
    assert told((pool * np.array([4.0, 0.25] + [1.0] * 8)).sum(1)) >= 97


def test_everything_is_read_of_moderate_traffic_and_of_bursts() -> None:
    sample = TrafficSample()
    seconds = 1e9 + np.arange(200_000) / PER_SECOND
    assert sample.choose(np.arange(len(seconds)), seconds).all()
    burst = int(RESERVE / 2)
    assert sample.choose(np.arange(burst), np.full(burst, 1e9 + 1e6)).all()


@pytest.mark.parametrize("rate", [20_000.0, 200_000.0])
def test_traffic_that_lasts_is_read_at_a_limited_rate_and_evenly(rate: float) -> None:
    sample = TrafficSample()
    seconds = 1e9 + np.arange(0.0, 60.0, 64 / rate).repeat(64)  # requests of 64 rows
    chosen = sample.choose(np.arange(len(seconds)), seconds)
    last = chosen[len(chosen) // 2 :]
    assert last.sum() / 30.0 == pytest.approx(PER_SECOND, rel=0.1)
    by_row = last[: len(last) // 64 * 64].reshape(-1, 64).mean(0)
    assert by_row.std() < 5 * np.sqrt(by_row.mean() / (len(last) / 64))


def test_a_clock_that_was_set_back_does_not_stop_the_reading() -> None:
    sample = TrafficSample()
    seconds = 1e9 - 3600.0 * (np.arange(200_000) >= 50_000) + np.arange(200_000) / PER_SECOND
    assert sample.choose(np.arange(len(seconds)), seconds).all()
    assert sample.reserve[1] == 999_996_499.9995


def test_the_choice_does_not_depend_on_how_the_log_is_cut() -> None:
    random = np.random.default_rng(0)
    seq, seconds = np.arange(100_000), 1e9 + np.sort(random.uniform(0.0, 2.0, 100_000))
    whole = TrafficSample().choose(seq, seconds)
    assert 0.2 < whole.mean() < 0.9
    sample, cuts = TrafficSample(), np.sort(random.integers(0, len(seq), 300))
    parts = zip(np.split(seq, cuts), np.split(seconds, cuts), strict=True)
    found = []
    for some, times in parts:
        restored = TrafficSample()
        restored.load_state_dict(sample.state_dict())
        sample = restored
        found.append(sample.choose(some, times))
    assert np.array_equal(np.concatenate(found), whole)


def test_every_half_and_every_tie_is_rounded_as_numpy_does() -> None:
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = np.unique(every[np.isfinite(every)].astype(np.float64))
    ties = (halves[1:] + halves[:-1]) / 2
    below = np.concatenate([halves, ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf), [-1e-30]])
    numbers = below[(below <= 0) & (below >= -65504)][:, None]
    found = unpack(pack(np.hstack([np.zeros_like(numbers), numbers])))
    assert np.array_equal(found[:, 0], np.zeros(len(numbers)))
    assert np.array_equal(found[:, 1], numbers[:, 0].astype(np.float16).astype(np.float64))


@pytest.mark.parametrize("size", [2, 10, 1000])
@pytest.mark.parametrize("offset", [0.0, -3e3, 3e3, 6e3, 7e4, -1e6, 1e6])
def test_probabilities_are_those_that_were_served_whatever_the_offset(size: int, offset: float) -> None:
    logits = 3.0 * np.random.default_rng(0).normal(size=(500, size)) + offset
    found = unpack(pack(logits))
    assert np.abs(softmax(found) - softmax(logits)).max() < 0.001
    assert np.abs(found - logits).max() < 0.02


@pytest.mark.parametrize(("spread", "temperature"), [(1e5, 1.0), (1e5, 3e4), (1e9, 3e8), (1e-3, 1e-3)])
def test_rows_wider_than_float16_keep_their_probabilities(spread: float, temperature: float) -> None:
    logits = spread * np.random.default_rng(1).normal(size=(500, 10)) - spread
    found = unpack(pack(logits))
    assert np.abs(softmax(found / temperature) - softmax(logits / temperature)).max() < 0.001


def test_extreme_logits_stay_finite_and_in_their_order() -> None:
    found = unpack(pack(np.array([[1e300, 0.0, -1e300], [-1e300, -1e300, -np.inf], [5.0, 5.0, 5.0]])))
    assert np.isfinite(found).all()
    assert found[0].argmax() == 0
    assert found[0].argmin() == 2
    assert np.array_equal(found[2], [5.0, 5.0, 5.0])
