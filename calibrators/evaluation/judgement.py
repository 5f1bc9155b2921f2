"""A classifier judged by every metric, with intervals, and two classifiers compared sample by sample.

Stands between the condensed outcomes and the report.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from calibrators.evaluation.bootstrap import (
    DRAWS,
    BinnedError,
    Deviations,
    ErrorNorm,
    Estimate,
    SmoothError,
    mean_estimates,
    norm_deviations,
    proportion_difference,
    proportion_estimate,
)
from calibrators.evaluation.outcomes import Outcomes


@dataclass(frozen=True, eq=False)
class Judgement:
    """The metrics of one classifier on N samples.

    Attributes
    ----------
    scored : Outcomes
        What was judged.
    estimates : dict of Estimate
        Each metric of `Metrics` by name, with its 95 % interval.
    deviations : dict of Deviations
        For the calibration errors: the resampled noise that paired comparisons need.
    """

    scored: Outcomes
    estimates: dict[str, Estimate]
    deviations: dict[str, Deviations]

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return value and interval of each metric; of calibration errors also `perfect`, `p_value`.

        `perfect` is the mean value if labels were drawn from the probabilities themselves, `p_value` the
        chance of a value at least as large then.
        """
        document: dict[str, dict[str, Any]] = {}
        for name, estimate in self.estimates.items():
            document[name] = dict(estimate.to_dict())
            if name in self.deviations:
                deviation = self.deviations[name]
                document[name] |= {"perfect": float(deviation.perfect.mean()), "p_value": deviation.p_value}
        return document


def judge(scored: Outcomes, *, seed: int = 0, draws: int = DRAWS) -> Judgement:
    """Judge a classifier's outcomes; the same seed on the same samples makes two judgements comparable."""
    nll, brier = mean_estimates(np.column_stack([scored.nll, scored.brier]), draws=draws, seed=seed)
    norms: list[ErrorNorm] = [BinnedError(scored, "width"), BinnedError(scored, "mass"), SmoothError(scored)]
    found = norm_deviations(norms, scored.confidence, draws=draws, seed=seed)
    deviations = {norm.name: deviation for norm, deviation in zip(norms, found, strict=True)}
    estimates = {"error_rate": proportion_estimate(1 - scored.correct), "nll": nll, "brier": brier}
    estimates |= {name: deviation.estimate() for name, deviation in deviations.items()}
    return Judgement(scored, estimates, deviations)


def compare(first: Judgement, second: Judgement, *, seed: int = 0, draws: int = DRAWS) -> dict[str, Estimate]:
    """Return first minus second, paired by sample, with 95 % intervals: below 0 the first is better.

    Both must have been judged on the same samples with the same seed and number of draws.
    """
    a, b = first.scored, second.scored
    with np.errstate(invalid="ignore"):
        columns = np.column_stack([a.nll - b.nll, a.brier - b.brier])
    nll, brier = mean_estimates(columns, draws=draws, seed=seed)
    result = {
        "error_rate": proportion_difference(1 - a.correct, 1 - b.correct),
        "nll": nll,
        "brier": brier,
    }
    for name, deviation in first.deviations.items():
        result[name] = deviation.minus(second.deviations[name])
    return result
