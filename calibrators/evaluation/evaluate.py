"""A classifier judged by every metric, with intervals and tests, and two classifiers compared by sample.

Stands between the condensed outcomes and the report.

Metrics under perfect calibration: labels are drawn from the probabilities.

Computes the distribution of each metric of the whole probability vector under perfect calibration. Top-label
errors draw theirs together with the bootstrap, because only the correctness is random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.evaluation.bootstrap import (
    LEVEL,
    Deviations,
    Estimate,
    Resamples,
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
    cell_indices,
)
from boxcal.calibrators.evaluation.outcomes import (
    ROWS_AT_ONCE,
    Indices,
    Matrix,
    Outcomes,
    Tell,
    Vector,
    silent,
)
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
from boxcal.calibrators.threads import in_order, one_library_thread, over_blocks

LABEL_DRAWS = 400
HITS_AT_ONCE = 4_000_000
"""Hits by cell that are judged at once: 32 MB, three times."""
LEAST = 1e-300
"""A probability counts as so much where a label may be wrong, so that no single one decides."""


def perfect_metrics(
    scored: Outcomes, cells: ClassCells, *, draws: int = LABEL_DRAWS, seed: int = 0, tell: Tell = silent
) -> dict[str, Vector]:
    """Return the values (draws,) of each metric of the whole vector, with new labels for each draw."""
    from boxcal.calibrators.evaluation import loops  # noqa: PLC0415 - numba loads when needed

    rng = np.random.default_rng([seed, 2])
    samples = len(scored)
    nll, brier, right = np.zeros(draws), np.zeros(draws), np.zeros(draws)
    # The smaller of two: hits by cell, or the cells that were hit.
    are_kept = samples < len(cells.mass)
    hits = np.zeros((0 if are_kept else len(cells.mass), draws))
    places: list[NDArray[np.int32]] = []
    counts = np.ones(samples) if scored.weights is None else scored.weights

    def work(given: tuple[slice, Matrix]) -> tuple[Vector, Vector, Vector, Indices]:
        part, uniform = given
        rows = scored.probabilities.at(part)
        labels = np.empty(uniform.shape, dtype=np.int64)
        loops.draw_labels(rows, uniform, labels)
        of_label = np.take_along_axis(rows, labels, axis=1)
        squares = np.einsum("nk,nk->n", rows, rows)[:, None] - 2 * of_label + 1
        place = np.take_along_axis(cell_indices(rows), labels, axis=1)
        right = labels == scored.predicted[part, None]
        if scored.weights is None:
            return np.log(of_label).sum(axis=0), squares.sum(axis=0), right.sum(axis=0), place
        weights = scored.weights[part]
        return weights @ np.log(of_label), weights @ squares, weights @ right, place

    starts = range(0, samples, ROWS_AT_ONCE)
    parts = (slice(start, min(start + ROWS_AT_ONCE, samples)) for start in starts)
    given = ((part, rng.random((part.stop - part.start, draws))) for part in parts)
    for start, (logs, squares, correct, place) in zip(starts, in_order(work, given), strict=True):
        nll -= logs
        brier += squares
        right += correct
        if are_kept:
            places.append(place.astype(np.int32))
        else:
            loops.count_hits(place, counts[start : start + ROWS_AT_ONCE], hits)
        tell(min(1.0, (start + ROWS_AT_ONCE) / samples))
    step = max(1, min(32, HITS_AT_ONCE // len(cells.mass)))
    errors = []
    for first in range(0, draws, step):
        some = hits[:, first : first + step]
        if are_kept:
            place = np.concatenate([part[:, first : first + step] for part in places]).astype(np.int64)
            some = np.zeros((len(cells.mass), place.shape[1]))
            loops.count_hits(place, counts, some)
        errors.append((cells.brier_calibration(some), cells.classwise_ece(some)))
    calibration, classwise = map(np.concatenate, zip(*errors, strict=True))
    return {
        "error_rate": 1 - right / samples,
        "nll": nll / samples,
        "brier": brier / samples,
        "brier_calibration": calibration,
        "brier_refinement": brier / samples - calibration,
        "classwise_ece": classwise,
    }


TWO_SIDED = {"error_rate", "nll", "brier", "brier_refinement"}
"""Metrics that imperfect calibration may move either way."""

_BLOCK = 2_000_000


@dataclass(frozen=True)
class Perfect:
    """What a metric would be under perfect calibration: labels drawn from the probabilities themselves."""

    value: float  # The mean over such draws
    # Chance of a value at least as extreme as the one found; uniform if the model is calibrated
    p_value: float


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The metrics of one classifier on N samples."""

    scored: Outcomes
    cells: ClassCells  # Its sums over the cells of every class
    estimates: dict[str, Estimate]  # Each metric of `Metrics` by name, with its 95 % interval
    perfect: dict[str, Perfect]  # What perfect calibration would give, by metric
    # For the calibration errors: the resampled noise that paired comparisons need
    deviations: dict[str, Deviations]
    maximum: MaximumError  # MCE, whose comparisons rest on exact limits
    resamples: Resamples

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


@one_library_thread()
def judge(
    scored: Outcomes,
    *,
    seed: int = 0,
    draws: int | None = None,
    resamples: Resamples | None = None,
    tell: Tell = silent,
) -> Evaluation:
    """Judge a classifier's outcomes; the same seed on the same samples makes two judgements comparable.

    `tell`: called with the fraction done.
    """
    if resamples is None:
        resamples = Resamples(len(scored), draws=draws, seed=seed, groups=scored.groups)
    cells = ClassCells(scored, _part(tell, 0.0, 0.1))
    by_sign, by_gap = cells.influences(scored, _part(tell, 0.1, 0.2))
    maximum = MaximumError(scored)
    top_label: list[TopLabelError] = [
        BinnedError(scored, "width"),
        BinnedError(scored, "mass"),
        SmoothError(scored),
        DebiasedError(scored),
        KolmogorovSmirnovError(scored),
    ]
    whole: list[Resampled] = [
        ClasswiseError(scored, cells, by_sign),
        BrierCalibration(cells, by_gap),
        BrierRefinement(scored, cells, by_gap),
    ]
    drawn = perfect_metrics(scored, cells, seed=seed, tell=_part(tell, 0.2, 0.4))
    tops: list[TopLabelError | MaximumError] = [*top_label, maximum]
    drawn |= _perfect_top_label(tops, scored.confidence, resamples.draws, seed, _part(tell, 0.4, 0.7))
    deviations = deviations_of(top_label, whole, resamples, tell=_part(tell, 0.7, 0.95))
    nll, brier = mean_estimates(
        np.column_stack([scored.nll, scored.brier]), resamples, weights=scored.weights
    )
    tell(1.0)
    estimates = {
        "error_rate": proportion_estimate(1 - scored.correct, scored.weights, scored.groups),
        "nll": Estimate(nll.value, max(nll.low, 0.0), nll.high),
        "brier": Estimate(brier.value, max(brier.low, 0.0), brier.high),
    }
    statistics = {name: estimate.value for name, estimate in estimates.items()}
    for metric in [*top_label, *whole]:
        statistics[metric.name] = metric.statistic
        reach = metric.statistic <= metric.perfect_scale * quantile(drawn[metric.name], (1 + LEVEL) / 2)
        estimates[metric.name] = deviations[metric.name].estimate(
            reaches_zero=bool(reach) and metric.name not in TWO_SIDED
        )
    statistics["mce"] = maximum.statistic
    estimates["mce"] = Estimate(maximum.value, *maximum.limits(1 - LEVEL))
    rng = np.random.default_rng([seed, 3])
    perfect = {name: _perfect(name, statistics[name], drawn[name], rng) for name in statistics}
    return Evaluation(scored, cells, estimates, perfect, deviations, maximum, resamples)


def compare(first: Evaluation, second: Evaluation) -> dict[str, Estimate]:
    """Return first minus second, paired by sample, with 95 % intervals: below 0 the first is better.

    Both must have been judged on the same samples with the same seed and number of draws.
    """
    nll, brier = mean_estimates(
        _differences(first.scored, second.scored), first.resamples, weights=first.scored.weights
    )
    result = {
        "error_rate": proportion_difference(
            1 - first.scored.correct, 1 - second.scored.correct, first.scored.weights, first.scored.groups
        ),
        "nll": nll,
        "brier": brier,
    }
    for name, deviation in first.deviations.items():
        result[name] = deviation.minus(second.deviations[name])
    result["mce"] = _maximum_difference(first.maximum, second.maximum)
    return result


@one_library_thread()
def verdict(first: Evaluation, second: Evaluation, active: str, *, unrelated: float = 0.0) -> Verdict:
    """Decide whether the first is better than the second, the method `active`; both as for `compare`.

    `unrelated`: the share of the labels that were drawn at random, whatever the sample, which the labels of
    new samples are not.
    """
    names, one, other = ("nll", "brier"), first.scored, second.scored
    smooth = [side.deviations["smooth_ece"] for side in (first, second)]
    if unrelated:
        one, other = (_with_true_labels(scored, unrelated) for scored in (one, other))
        smooth = [
            deviations_of([SmoothError(scored)], [], first.resamples)["smooth_ece"] for scored in (one, other)
        ]
    found = mean_estimates(
        _differences(one, other),
        first.resamples,
        level=[LEVELS[name] for name in names],
        weights=one.weights,
    )
    differences = dict(zip(names, found, strict=True))
    return Verdict(active, differences | {"smooth_ece": smooth[0].minus(smooth[1], LEVELS["smooth_ece"])})


def _with_true_labels(scored: Outcomes, unrelated: float) -> Outcomes:
    """Estimate the outcomes without bias as they would be, were no label drawn at random.

    Of a loss, (its value at the label - e (its mean over the classes)) / (1 - e) for the share e of labels
    that are drawn uniformly from the classes that occur (Natarajan et al. 2013).
    """
    present = np.unique(scored.labels)

    def work(part: slice) -> Matrix:
        rows = scored.probabilities.at(part)
        chosen = rows[:, present]
        squares = np.einsum("nk,nk->n", rows, rows)
        return np.stack(
            [-np.log(np.maximum(chosen, LEAST)).mean(axis=1), squares - 2 * chosen.mean(axis=1) + 1]
        )

    nll, brier = np.concatenate(list(over_blocks(work, len(scored), ROWS_AT_ONCE)), axis=1)
    chance = np.isin(scored.predicted, present) / len(present)

    def corrected(values: Vector, mean: Vector) -> Vector:
        result: Vector = (values - unrelated * mean) / (1 - unrelated)
        return result

    return replace(
        scored,
        nll=corrected(np.minimum(scored.nll, -math.log(LEAST)), nll),
        brier=corrected(scored.brier, brier),
        correct=corrected(scored.correct, chance),
    )


def _part(tell: Tell, begin: float, end: float) -> Tell:
    """Map the progress of one step onto its share of the whole."""
    return lambda fraction: tell(begin + (end - begin) * fraction)


def _differences(a: Outcomes, b: Outcomes) -> Matrix:
    """Return NLL and Brier score of every sample, first minus second: (N, 2)."""
    with np.errstate(invalid="ignore"):
        return np.column_stack([a.nll - b.nll, a.brier - b.brier])


def _maximum_difference(first: MaximumError, second: MaximumError) -> Estimate:
    """Difference of two MCEs from the exact limits of both, each at half the error."""
    (low, high), (other_low, other_high) = (m.limits((1 - LEVEL) / 2) for m in (first, second))
    return Estimate(first.value - second.value, low - other_high, high - other_low)


def _perfect_top_label(
    metrics: Sequence[TopLabelError | MaximumError], confidence: Vector, draws: int, seed: int, tell: Tell
) -> dict[str, Vector]:
    """Values (draws,) of the top-label metrics where correctness is a coin with the confidence's bias."""
    rng = np.random.default_rng([seed, 1])
    size = max(1, _BLOCK // len(confidence))
    sizes = (min(size, draws - start) for start in range(0, draws, size))

    def work(uniform: Matrix) -> list[Vector]:
        residuals = confidence[:, None] - (uniform < confidence[:, None])
        return [metric.errors(residuals) for metric in metrics]

    found = []
    for values in in_order(work, (rng.random((len(confidence), columns)) for columns in sizes)):
        found.append(values)
        tell(min(1.0, len(found) * size / draws))
    joined = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return {metric.name: values for metric, values in zip(metrics, joined, strict=True)}


def _perfect(name: str, statistic: float, drawn: Vector, rng: np.random.Generator) -> Perfect:
    """Rank a statistic among draws under perfect calibration; ties fall at random, so the rank is uniform."""
    tied = np.isclose(drawn, statistic, rtol=1e-12, atol=1e-12)  # sums in another order differ by rounding
    rank = 1 + int((~tied & (drawn > statistic)).sum()) + int(rng.integers(0, tied.sum() + 1))
    total = len(drawn) + 1
    tail = 2 * min(rank, total + 1 - rank) if name in TWO_SIDED else rank
    p_value = min(1.0, tail / total) if math.isfinite(statistic) else 0.0
    return Perfect(max(0.0, float(drawn.mean())), p_value)
