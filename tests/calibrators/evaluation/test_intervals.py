"""Intervals keep their promise, and p-values are uniform where the model is calibrated: by simulation."""

import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import kstest

from boxcal.calibrators.evaluation import expected_calibration_error
from boxcal.calibrators.evaluation.bootstrap import (
    Resamples,
    mean_estimates,
    proportion_difference,
    proportion_estimate,
)
from boxcal.calibrators.evaluation.evaluate import compare, judge
from boxcal.calibrators.evaluation.outcomes import outcomes
from tests.calibrators.evaluation.simulation import WORLDS, World, sample, true_maximum, true_metrics
from tests.calibrators.samples import softmax

CLAIMED = 0.93
"""What intervals that claim 95 % must cover at least."""

RESOLUTION = 2e-4
"""Error of the simulated truth itself (smECE's bisection resolves no better than 1/1024 either way)."""


def least_hits(trials: int) -> int:
    """Fewest hits in so many trials that do not refute a coverage of 93 % at 1 in 10,000."""
    return math.floor(CLAIMED * trials - 3.72 * math.sqrt(trials * CLAIMED * (1 - CLAIMED)))


def test_more_than_200_000_samples_are_drawn_400_times() -> None:
    found = [Resamples(count) for count in (2, 200_000, 200_001, 1_000_000)]
    assert [one.draws for one in found] == [1000, 1000, 400, 400]
    assert [one.units for one in found] == [2, 200_000, 200_000, 200_000]


@pytest.mark.parametrize("count", [300_000, 1_000_000])
def test_random_groups_of_many_samples_vary_as_the_samples_do(count: int) -> None:
    """In the order of the labels, as files may be; 400 draws tell a width to about 5 %."""
    labels = np.sort(np.random.default_rng(0).random(count) < 0.1).astype(np.float64)
    resamples = Resamples(count)
    (mean,) = mean_estimates(labels[:, None], resamples)
    width = 2 * 1.96 * math.sqrt(0.1 * 0.9 / count)
    assert mean.high - mean.low == pytest.approx(width, rel=0.15)
    sums = np.concatenate([labels @ weights for weights in resamples.blocks()])
    assert np.quantile(sums / count, 0.975) - np.quantile(sums / count, 0.025) == pytest.approx(
        width, rel=0.15
    )


def covered(world: World, count: int, trials: int, draws: int) -> Counter[str]:
    truth = true_metrics(world)
    hits: Counter[str] = Counter()
    for trial in range(trials):
        scored, chances = sample(world, count, np.random.default_rng([trial, count, 7]))
        target = {**truth, "mce": true_maximum(scored, chances)}
        for name, estimate in judge(scored, seed=trial, draws=draws).estimates.items():
            assert estimate.low <= estimate.value <= estimate.high, name
            hits[name] += estimate.low - RESOLUTION <= target[name] <= estimate.high + RESOLUTION
    return hits


@pytest.mark.parametrize(
    ("name", "trials", "draws"),
    [
        *((name, 30, 200) for name in ("calibrated", "capped")),
        *(pytest.param(name, 1800, 400, marks=pytest.mark.long) for name in WORLDS),
    ],
)
def test_intervals_cover(name: str, trials: int, draws: int) -> None:
    hits = covered(WORLDS[name], 500, trials, draws)
    least = least_hits(trials) if trials < 1000 else needed_hits(trials, CLAIMED)
    assert min(hits.values()) >= least, {metric: hits[metric] / trials for metric in sorted(hits)}


def needed_hits(trials: int, claimed: float) -> int:
    """Fewest hits that do not refute a coverage at 1 in 200; a coverage of 90 % has them once in 20 runs."""
    needed = math.floor(claimed * trials - 2.58 * math.sqrt(trials * claimed * (1 - claimed)))
    assert needed > 0.9 * trials + 1.645 * math.sqrt(trials * 0.9 * 0.1), "too few trials to notice 90 %"
    return needed


def test_intervals_of_means_cover() -> None:
    """The metrics that are means are quick enough for the trials that notice 90 % where 95 % is claimed."""
    trials, world = 600, WORLDS["overconfident"]
    truth, hits = true_metrics(world), Counter[str]()
    for trial in range(trials):
        scored, _ = sample(world, 300, np.random.default_rng([trial, 13]))
        nll, brier = mean_estimates(
            np.column_stack([scored.nll, scored.brier]), Resamples(len(scored), draws=200, seed=trial)
        )
        rate = proportion_estimate(1 - scored.correct)
        for metric, one in (("nll", nll), ("brier", brier), ("error_rate", rate)):
            hits[metric] += one.low <= truth[metric] <= one.high
    assert min(hits.values()) >= needed_hits(trials, 0.95), hits


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("alike", [0.0, 1.0])
@pytest.mark.parametrize("rate", [0.005, 0.2])
def test_intervals_of_proportions_cover_where_samples_form_groups(
    rate: float, alike: float, weighted: bool
) -> None:
    """Groups of one to five, the samples of which err together or not."""
    trials, hits = 400, Counter[str]()
    for trial in range(trials):
        rng = np.random.default_rng([trial, 17])
        groups = np.repeat(np.arange(300), rng.integers(1, 6, 300))
        chance = np.where(rng.random(len(groups)) < alike, rng.random(300)[groups], rng.random(len(groups)))
        after, before = chance < rate, (chance > 0.5) & (chance < 0.5 + rate / 2)
        weights = rng.exponential(size=len(groups)) + 0.05 if weighted else None
        share = proportion_estimate(after.astype(float), weights, groups)
        difference = proportion_difference(after.astype(float), before.astype(float), weights, groups)
        hits["share"] += share.low <= rate <= share.high
        hits["difference"] += difference.low <= rate / 2 <= difference.high
    assert min(hits.values()) >= least_hits(trials), hits


def test_intervals_of_proportions_cover_where_what_errs_has_large_weights() -> None:
    """Weights are exponential, and .05; of those above 2, .4 err: a weighted mean of 1.2 e^-1.95 / 1.05."""
    trials, rate, hits = 2000, 1.2 * math.exp(-1.95) / 1.05, Counter[str]()
    for trial in range(trials):
        rng = np.random.default_rng([trial, 19])
        weights = rng.exponential(size=400) + 0.05
        after, before = rng.random(400) < 0.4 * (weights > 2), rng.random(400) < 0.05
        share = proportion_estimate(after.astype(float), weights)
        difference = proportion_difference(after.astype(float), before.astype(float), weights)
        hits["share"] += share.low <= rate <= share.high
        hits["difference"] += difference.low <= rate - 0.05 <= difference.high
    assert min(hits.values()) >= needed_hits(trials, 0.95), hits


def test_one_group_that_differs_is_bounded() -> None:
    """Resamples without it showed a spread of nearly 0, and the interval reached from -1.2 to .001."""
    groups = np.repeat(np.arange(1000), 1 + np.arange(1000) % 2)
    one = (groups == 7).astype(float)
    found = proportion_difference(np.zeros(len(one)), one, None, groups)
    assert (found.low, found.value, found.high) == pytest.approx((-0.00584, -2 / 1500, 0.00318), abs=1e-5)
    (mean,) = mean_estimates(-one[:, None], Resamples(len(one), groups=groups))
    assert -0.02 < mean.low < mean.value < mean.high < 0.01


def differences_covered(trials: int, count: int, draws: int) -> Counter[str]:
    """Paired intervals of an overconfident model against the calibrated one, and against a twin of itself."""
    worlds = {
        "sharp": World("sharp", 5, 2.0, lambda z: softmax(1.6 * z)),
        "true": World("true", 5, 2.0, softmax),
        "twin": World("twin", 5, 2.0, lambda z: softmax(1.02 * z)),
    }
    truth = {name: true_metrics(world) for name, world in worlds.items()}
    hits: Counter[str] = Counter()
    for trial in range(trials):
        rng = np.random.default_rng([trial, 11])
        logits = rng.normal(size=(count, 5)) * 2.0
        labels = (softmax(logits).cumsum(axis=1) < rng.random((count, 1))).sum(axis=1)
        judged = {
            name: judge(outcomes(world.model(logits), labels), seed=trial, draws=draws)
            for name, world in worlds.items()
        }
        for first, second in (("sharp", "true"), ("twin", "true")):
            for metric, estimate in compare(judged[first], judged[second]).items():
                if metric == "mce":
                    continue  # its target is the sample's own; see `covered`
                gap = truth[first][metric] - truth[second][metric]
                hits[f"{first} {metric}"] += estimate.low - RESOLUTION <= gap <= estimate.high + RESOLUTION
    return hits


@pytest.mark.long
@pytest.mark.parametrize("count", [500, 3000])
def test_paired_differences_cover(count: int) -> None:
    hits = differences_covered(400, count, 400)
    assert min(hits.values()) >= least_hits(400), hits


def p_values(trials: int, count: int, draws: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for trial in range(trials):
        scored, _ = sample(WORLDS["calibrated"], count, np.random.default_rng([trial, 5]))
        for name, perfect in judge(scored, seed=trial, draws=draws).perfect.items():
            found.setdefault(name, []).append(perfect.p_value)
    return found


@pytest.mark.parametrize(
    ("trials", "count", "draws"), [(60, 400, 200), pytest.param(1500, 1000, 400, marks=pytest.mark.long)]
)
def test_p_values_are_uniform_on_calibrated_data(trials: int, count: int, draws: int) -> None:
    for name, values in p_values(trials, count, draws).items():
        assert kstest(values, "uniform").pvalue > 1e-4, name


def test_p_values_find_what_is_not_calibrated() -> None:
    scored, _ = sample(WORLDS["overconfident"], 1000, np.random.default_rng(1))
    judged = judge(scored)
    assert all(judged.perfect[name].p_value < 0.02 for name in judged.perfect)
    assert judged.perfect["ece_width"].value < judged.estimates["ece_width"].low


def test_the_value_under_perfect_calibration_is_eces_own_bias() -> None:
    """Perfectly calibrated data of 1,000 samples spread over [0, 1] have a mean ECE of about .029."""
    rng = np.random.default_rng(4)
    confidence = 0.5 + 0.5 * rng.random(1000)
    labels = (rng.random(1000) < confidence).astype(int)
    judged = judge(outcomes(np.column_stack([1 - confidence, confidence]), labels))
    fresh = []
    for _ in range(200):
        again = (rng.random(1000) < confidence).astype(int)
        fresh.append(expected_calibration_error(np.column_stack([1 - confidence, confidence]), again))
    assert judged.perfect["ece_width"].value == pytest.approx(np.mean(fresh), rel=0.1)


def test_equal_losses_tie_though_their_sums_are_rounded() -> None:
    """Half and half for all: the NLL of any labels is log 2, and its rank is drawn."""
    labels = np.arange(100) % 2
    drawn = [judge(outcomes(np.full((100, 2), 0.5), labels), seed=seed, draws=100) for seed in range(8)]
    for name in ("nll", "brier"):
        p_values = [one.perfect[name].p_value for one in drawn]
        assert len(set(p_values)) > 4
        assert np.mean(p_values) > 0.2


def test_the_interval_of_a_loss_ends_at_0() -> None:
    rows, labels = np.tile([1.0 - 1e-30, 1e-30], (100, 1)), np.zeros(100, int)
    labels[0] = 1
    nll = judge(outcomes(rows, labels)).estimates["nll"]
    assert (round(nll.value, 2), nll.low) == (0.69, 0.0)
    assert nll.high > 1.0


def test_a_label_of_probability_zero_leaves_nll_without_interval() -> None:
    probabilities = np.array([[1.0, 0.0], [0.5, 0.5], [0.6, 0.4]])
    judged = judge(outcomes(probabilities, [1, 0, 1])).to_dict()
    assert judged["nll"]["value"] is None
    assert judged["nll"]["low"] is None
    assert judged["nll"]["p_value"] == 0.0


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_handful_of_samples_can_be_judged(count: int) -> None:
    probabilities = softmax(np.random.default_rng(count).normal(size=(count, 3)))
    judged = judge(outcomes(probabilities, [0, 1, 2][:count]))
    for name, estimate in judged.estimates.items():
        assert estimate.low <= estimate.value <= estimate.high, name
