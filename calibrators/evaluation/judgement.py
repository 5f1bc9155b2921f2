"""A classifier judged by every metric, with intervals and tests, and two classifiers compared by sample.

Stands between the condensed outcomes and the report.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from boxcal.calibrators.evaluation.bootstrap import (
    DRAWS,
    LEVEL,
    Deviations,
    Estimate,
    deviations_of,
    mean_estimates,
    proportion_difference,
    proportion_estimate,
    quantile,
)
from boxcal.calibrators.evaluation.classwise import (
    BrierCalibration,
    BrierRefinement,
    ClassCells,
    ClasswiseError,
)
from boxcal.calibrators.evaluation.outcomes import Outcomes, Vector
from boxcal.calibrators.evaluation.perfect import perfect_metrics
from boxcal.calibrators.evaluation.toplabel import (
    BinnedError,
    DebiasedError,
    KolmogorovSmirnovError,
    MaximumError,
    Resampled,
    SmoothError,
    TopLabelError,
)
from boxcal.calibrators.evaluation.verdict import LEVELS, Verdict

TWO_SIDED = {"error_rate", "nll", "brier", "brier_refinement"}
"""Metrics that imperfect calibration may move either way."""

_BLOCK = 2_000_000


@dataclass(frozen=True)
class Perfect:
    """What a metric would be under perfect calibration: labels drawn from the probabilities themselves.

    Attributes
    ----------
    value : float
        The mean over such draws.
    p_value : float
        Chance of a value at least as extreme as the one found; uniform if the model is calibrated.
    """

    value: float
    p_value: float


@dataclass(frozen=True, eq=False)
class Judgement:
    """The metrics of one classifier on N samples.

    Attributes
    ----------
    scored : Outcomes
        What was judged.
    estimates : dict of Estimate
        Each metric of `Metrics` by name, with its 95 % interval.
    perfect : dict of Perfect
        What perfect calibration would give, by metric.
    deviations : dict of Deviations
        For the calibration errors: the resampled noise that paired comparisons need.
    maximum : MaximumError
        MCE, whose comparisons rest on exact limits.
    """

    scored: Outcomes
    estimates: dict[str, Estimate]
    perfect: dict[str, Perfect]
    deviations: dict[str, Deviations]
    maximum: MaximumError

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return `value`, `low`, `high`, `perfect` and `p_value` of each metric, JSON-ready."""
        return {
            name: {
                **estimate.to_dict(),
                "perfect": self.perfect[name].value,
                "p_value": self.perfect[name].p_value,
            }
            for name, estimate in self.estimates.items()
        }


def judge(scored: Outcomes, *, seed: int = 0, draws: int = DRAWS) -> Judgement:
    """Judge a classifier's outcomes; the same seed on the same samples makes two judgements comparable."""
    cells = ClassCells(scored)
    maximum = MaximumError(scored)
    top_label: list[TopLabelError] = [
        BinnedError(scored, "width"),
        BinnedError(scored, "mass"),
        SmoothError(scored),
        DebiasedError(scored),
        KolmogorovSmirnovError(scored),
    ]
    whole: list[Resampled] = [
        ClasswiseError(scored, cells),
        BrierCalibration(scored, cells),
        BrierRefinement(scored, cells),
    ]
    drawn = perfect_metrics(scored, cells, seed=seed)
    drawn |= _perfect_top_label([*top_label, maximum], scored.confidence, draws, seed)
    deviations = deviations_of(
        [*top_label, *whole], len(scored), draws=draws, seed=seed, groups=scored.groups
    )

    nll, brier = mean_estimates(
        np.column_stack([scored.nll, scored.brier]), draws=draws, seed=seed, groups=scored.groups
    )
    estimates = {"error_rate": _error_rate(scored, draws, seed), "nll": nll, "brier": brier}
    statistics = {name: estimate.value for name, estimate in estimates.items()}
    for metric in [*top_label, *whole]:
        statistics[metric.name] = metric.statistic
        reach = metric.statistic <= quantile(drawn[metric.name], (1 + LEVEL) / 2)
        estimates[metric.name] = deviations[metric.name].estimate(
            reaches_zero=bool(reach) and metric.name not in TWO_SIDED
        )
    statistics["mce"] = maximum.statistic
    estimates["mce"] = Estimate(maximum.value, *maximum.limits(1 - LEVEL))
    rng = np.random.default_rng([seed, 3])
    perfect = {name: _perfect(name, statistics[name], drawn[name], rng) for name in statistics}
    return Judgement(scored, estimates, perfect, deviations, maximum)


def compare(first: Judgement, second: Judgement, *, seed: int = 0, draws: int = DRAWS) -> dict[str, Estimate]:
    """Return first minus second, paired by sample, with 95 % intervals: below 0 the first is better.

    Both must have been judged on the same samples with the same seed and number of draws.
    """
    a, b = first.scored, second.scored
    with np.errstate(invalid="ignore"):
        columns = np.column_stack([a.nll - b.nll, a.brier - b.brier])
    nll, brier = mean_estimates(columns, draws=draws, seed=seed, groups=a.groups)
    result = {
        "error_rate": _error_difference(a, b, draws, seed),
        "nll": nll,
        "brier": brier,
    }
    for name, deviation in first.deviations.items():
        result[name] = deviation.minus(second.deviations[name])
    result["mce"] = _maximum_difference(first.maximum, second.maximum)
    return result


def verdict(
    first: Judgement,
    second: Judgement,
    active: str,
    *,
    selection_bias: Mapping[str, float],
    seed: int = 0,
    draws: int = DRAWS,
) -> Verdict:
    """Decide whether the first is better than the second, the method `active`; both as for `compare`.

    `selection_bias` says by how much `nll` and `brier` of the first are too low because the first was chosen
    by them.
    """
    a, b = first.scored, second.scored
    with np.errstate(invalid="ignore"):
        columns = np.column_stack([a.nll - b.nll, a.brier - b.brier])
    nll, brier = (
        mean_estimates(column[:, None], level=LEVELS[name], draws=draws, seed=seed, groups=a.groups)[0]
        for name, column in zip(("nll", "brier"), columns.T, strict=True)
    )
    smooth = first.deviations["smooth_ece"].minus(second.deviations["smooth_ece"], LEVELS["smooth_ece"])
    shifted = {
        name: one.plus(selection_bias.get(name, 0.0)) for name, one in (("nll", nll), ("brier", brier))
    }
    return Verdict(active, {**shifted, "smooth_ece": smooth})


def _error_rate(scored: Outcomes, draws: int, seed: int) -> Estimate:
    """Return the error rate; samples of a group err together, which the score interval does not know."""
    wrong = 1 - scored.correct
    if scored.groups is None:
        return proportion_estimate(wrong)
    (found,) = mean_estimates(wrong[:, None], draws=draws, seed=seed, groups=scored.groups)
    if found.low == found.high:  # none is wrong, or all are
        return proportion_estimate(np.full(int(scored.groups.max()) + 1, found.value))
    return Estimate(found.value, max(0.0, found.low), min(1.0, found.high))


def _error_difference(first: Outcomes, second: Outcomes, draws: int, seed: int) -> Estimate:
    wrong, other = 1 - first.correct, 1 - second.correct
    if first.groups is None:
        return proportion_difference(wrong, other)
    return mean_estimates((wrong - other)[:, None], draws=draws, seed=seed, groups=first.groups)[0]


def _maximum_difference(first: MaximumError, second: MaximumError) -> Estimate:
    """Difference of two MCEs from the exact limits of both, each at half the error."""
    (low, high), (other_low, other_high) = (m.limits((1 - LEVEL) / 2) for m in (first, second))
    return Estimate(first.value - second.value, low - other_high, high - other_low)


def _perfect_top_label(
    metrics: Sequence[TopLabelError | MaximumError], confidence: Vector, draws: int, seed: int
) -> dict[str, Vector]:
    """Values (draws,) of the top-label metrics where correctness is a coin with the confidence's bias."""
    rng = np.random.default_rng([seed, 1])
    values: dict[str, list[Vector]] = {metric.name: [] for metric in metrics}
    left = draws
    while left:
        size = min(left, max(1, _BLOCK // len(confidence)))
        residuals = confidence[:, None] - (rng.random((len(confidence), size)) < confidence[:, None])
        for metric in metrics:
            values[metric.name].append(metric.errors(residuals))
        left -= size
    return {name: np.concatenate(parts) for name, parts in values.items()}


def _perfect(name: str, statistic: float, drawn: Vector, rng: np.random.Generator) -> Perfect:
    """Rank a statistic among draws under perfect calibration; ties fall at random, so the rank is uniform."""
    ties = int((drawn == statistic).sum())
    rank = 1 + int((drawn > statistic).sum()) + int(rng.integers(0, ties + 1))
    total = len(drawn) + 1
    tail = 2 * min(rank, total + 1 - rank) if name in TWO_SIDED else rank
    p_value = min(1.0, tail / total) if math.isfinite(statistic) else 0.0
    return Perfect(max(0.0, float(drawn.mean())), p_value)
