"""Metrics under perfect calibration: labels are drawn from the probabilities.

Computes the distribution of each metric of the whole probability vector under perfect calibration. Top-label
errors draw theirs together with the bootstrap, because only the correctness is random.
"""

from __future__ import annotations

import numpy as np

from boxcal.calibrators.evaluation.classwise import ClassCells, cell_indices
from boxcal.calibrators.evaluation.outcomes import ROWS_AT_ONCE, Outcomes, Tell, Vector, silent
from boxcal.calibrators.evaluation.rows import Indices, Matrix
from boxcal.calibrators.threads import in_order

LABEL_DRAWS = 400


def perfect_metrics(
    scored: Outcomes, cells: ClassCells, *, draws: int = LABEL_DRAWS, seed: int = 0, tell: Tell = silent
) -> dict[str, Vector]:
    """Return the values (draws,) of each metric of the whole vector, with new labels for each draw."""
    from boxcal.calibrators.evaluation import loops  # noqa: PLC0415 - numba loads when needed

    rng = np.random.default_rng([seed, 2])
    samples = len(scored)
    nll, brier, right = np.zeros(draws), np.zeros(draws), np.zeros(draws)
    hits = np.zeros((len(cells.mass), draws))
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
        loops.count_hits(place, counts[start : start + ROWS_AT_ONCE], hits)
        tell(min(1.0, (start + ROWS_AT_ONCE) / samples))
    calibration = np.concatenate([cells.brier_calibration(hits[:, i : i + 32]) for i in range(0, draws, 32)])
    classwise = np.concatenate([cells.classwise_ece(hits[:, i : i + 32]) for i in range(0, draws, 32)])
    return {
        "error_rate": 1 - right / samples,
        "nll": nll / samples,
        "brier": brier / samples,
        "brier_calibration": calibration,
        "brier_refinement": brier / samples - calibration,
        "classwise_ece": classwise,
    }
