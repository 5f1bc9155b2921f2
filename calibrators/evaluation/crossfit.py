"""Cross-fitting: calibrated answers for every validation sample, each from a fit that never saw it.

A checked validation set goes in; answers come out, which the report and the comparison of methods judge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.array_calibrator import ArrayCalibrator, CalibratedArrays, TwoStages
from boxcal.calibrators.data import ValidationSet, fold_masks
from boxcal.calibrators.errors import InvalidDataError
from boxcal.calibrators.evaluation.outcomes import (
    ROWS_AT_ONCE,
    Indices,
    Matrix,
    ProbabilityRows,
    Tell,
    calibrated_rows,
    is_plain,
    joined_rows,
    kept_rows,
    silent,
)
from boxcal.calibrators.threads import over_blocks

FOLDS = 5

Progress = Callable[[float, str], None]
"""Called with the fraction done, 0 to 1, and what is being done."""
Unseen = Sequence[tuple[NDArray[np.bool_], ArrayCalibrator]]
"""A calibrator for each fold, which has not seen the samples (N,) of the mask."""


@dataclass(frozen=True, eq=False)
class CalibratedAnswers:
    """A calibrator's answers to N samples, and how often its bounds held them."""

    rows: ProbabilityRows  # The probabilities (N, K)
    predicted: Indices  # int64 (N,), the largest probability; ties go to the larger calibrated logit
    ties: int  # Samples whose largest probability several classes share
    lower_samples: int  # Samples with a probability on a lower bound above 0, or on an upper bound below 1
    upper_samples: int
    lower_probabilities: int  # Probabilities on such a bound
    upper_probabilities: int
    lower_range: tuple[float, float, float]  # Smallest, mean and largest effective bound
    upper_range: tuple[float, float, float]

    @property
    def probabilities(self) -> Matrix:
        """All the probabilities, float64 (N, K)."""
        return self.rows.at(slice(None))

    def bounds(self) -> dict[str, Any]:
        """Return the bounds and how often they bind, JSON-ready."""
        return {
            side: {
                "smallest": span[0],
                "mean": span[1],
                "largest": span[2],
                "samples": samples,
                "probabilities": probabilities,
            }
            for side, span, samples, probabilities in (
                ("lower", self.lower_range, self.lower_samples, self.lower_probabilities),
                ("upper", self.upper_range, self.upper_samples, self.upper_probabilities),
            )
        }


def predicted_labels(answer: CalibratedArrays) -> Indices:
    """Return the label of the largest probability of each row (N,); ties go to the larger logit."""
    largest = answer.probabilities.max(axis=1, keepdims=True)
    return np.asarray(np.where(answer.probabilities < largest, -np.inf, answer.logits).argmax(axis=1))


def answers_of(calibrator: TwoStages, scores: NDArray[Any], tell: Tell = silent) -> CalibratedAnswers:
    """Ask a calibrator for all rows of what it reads, (N, K) logits or (N, D) features, a block at a time."""
    calibrator, count = calibrator.on_arrays, len(scores)
    kept = None if is_plain(calibrator) else np.empty((count, calibrator.num_classes))

    def work(part: slice) -> CalibratedAnswers:
        answer = calibrator.calibrate(scores[part])
        if kept is not None:
            kept[part] = answer.probabilities
        return _block_answers(answer)

    blocks = []
    for block in over_blocks(work, count, ROWS_AT_ONCE):
        blocks.append(block)
        tell(min(1.0, len(blocks) * ROWS_AT_ONCE / count))
    rows = kept_rows(kept) if kept is not None else calibrated_rows(calibrator, scores)
    return pooled(blocks, rows, np.concatenate([block.predicted for block in blocks]))


def answers_on(calibrator: TwoStages, data: ValidationSet, tell: Tell = silent) -> CalibratedAnswers:
    """Ask a calibrator for all samples of a set: it reads their logits, features or shifted inputs."""
    reading = calibrator.on_arrays
    return answers_of(reading, data.logits if is_plain(reading) else reading.source(data), tell)


def cross_fit(
    method: str,
    data: ValidationSet,
    *,
    folds: int = FOLDS,
    seed: int = 0,
    progress: Progress | None = None,
    unseen: Unseen = (),
) -> CalibratedAnswers:
    """Calibrate each fold of the samples by a fit on the other folds, or by that of `unseen`.

    `progress`: called with the fraction done and what is being done; an exception it raises ends the fits.
    """
    if not 2 <= folds <= len(data):
        raise InvalidDataError(f"cross-fitting takes 2 to N = {len(data)} folds, not {folds}")
    masks = [mask for mask, _ in unseen] or fold_masks(data, folds, seed)
    fold_of, place_in = np.empty((2, len(data)), dtype=np.int64)
    predicted = np.empty(len(data), np.int64)
    blocks, parts = list[CalibratedAnswers](), list[ProbabilityRows]()
    for place, mask in enumerate(masks):

        def tell(fraction: float, stage: str, place: int = place) -> None:
            if progress is not None:
                progress((place + fraction) / len(masks), f"fold {place + 1} of {len(masks)}: {stage}")

        tell(0.0, "fitting")
        if unseen:
            calibrator = unseen[place][1]
        else:
            calibrator = fit_set(method, data.rows(~mask), seed=seed, progress=share_of(tell, 0.0, 0.9))
        block = answers_on(calibrator, data.rows(mask), _calibrating(share_of(tell, 0.9, 1.0)))
        inside = np.flatnonzero(mask)
        fold_of[inside], predicted[mask] = place, block.predicted
        if is_plain(calibrator):
            parts.append(calibrated_rows(calibrator, data.logits))
            place_in[inside] = inside
        else:
            parts.append(block.rows)
            place_in[inside] = np.arange(len(inside))
        blocks.append(block)
    return pooled(blocks, joined_rows(parts, fold_of, place_in), predicted)


def share_of(tell: Progress, begin: float, end: float) -> Progress:
    """Give the progress of one step its share of the whole."""
    return lambda fraction, stage: tell(begin + (end - begin) * fraction, stage)


def _calibrating(tell: Progress) -> Tell:
    return lambda fraction: tell(fraction, "calibrating")


def fit_set(
    method: str, data: ValidationSet, *, seed: int, progress: Progress | None = None
) -> ArrayCalibrator:
    """Fit a method to a checked validation set."""
    from boxcal.calibrators.fitting.api import fit_data  # noqa: PLC0415 - fits load scipy

    return fit_data(method, data, seed=seed, progress=progress).on_arrays


def _block_answers(answer: CalibratedArrays) -> CalibratedAnswers:
    probabilities, (lower, upper) = answer.probabilities, answer.box
    at_lower = (probabilities == lower) & (lower > 0)
    at_upper = (probabilities == upper) & (upper < 1)
    shared = (probabilities == probabilities.max(axis=1, keepdims=True)).sum(axis=1) > 1
    return CalibratedAnswers(
        rows=kept_rows(np.empty((0, probabilities.shape[1]))),
        predicted=predicted_labels(answer),
        ties=int(shared.sum()),
        lower_samples=int(at_lower.any(axis=1).sum()),
        upper_samples=int(at_upper.any(axis=1).sum()),
        lower_probabilities=int(at_lower.sum()),
        upper_probabilities=int(at_upper.sum()),
        lower_range=_span(lower),
        upper_range=_span(upper),
    )


def _span(bound: Matrix) -> tuple[float, float, float]:
    return float(bound.min()), float(bound.mean()), float(bound.max())


def pooled(
    blocks: Sequence[CalibratedAnswers], rows: ProbabilityRows, predicted: Indices
) -> CalibratedAnswers:
    """Join the counts of blocks of samples; `rows` and `predicted` are of all samples."""
    sizes = np.array([len(block.predicted) for block in blocks], dtype=np.float64)

    def total(name: str) -> int:
        return sum(getattr(block, name) for block in blocks)

    def span(name: str) -> tuple[float, float, float]:
        low, mean, high = np.array([getattr(block, name) for block in blocks]).T
        return float(low.min()), float(np.average(mean, weights=sizes)), float(high.max())

    return CalibratedAnswers(
        rows,
        predicted,
        total("ties"),
        total("lower_samples"),
        total("upper_samples"),
        total("lower_probabilities"),
        total("upper_probabilities"),
        span("lower_range"),
        span("upper_range"),
    )
