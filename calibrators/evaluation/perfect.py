"""Metrics under perfect calibration: labels are drawn from the probabilities.

Computes the distribution of each metric of the whole probability vector under perfect calibration. Top-label
errors draw theirs together with the bootstrap, because only the correctness is random.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.evaluation.classwise import ClassCells, blocks
from boxcal.calibrators.evaluation.outcomes import Outcomes, Vector

LABEL_DRAWS = 400


def perfect_metrics(
    scored: Outcomes, cells: ClassCells, *, draws: int = LABEL_DRAWS, seed: int = 0
) -> dict[str, Vector]:
    """Return the values (draws,) of each metric of the whole vector, with new labels for each draw."""
    rng = np.random.default_rng([seed, 2])
    samples = len(scored)
    nll, brier, right = np.zeros(draws), np.zeros(draws), np.zeros(draws)
    hits = np.zeros((len(cells.mass), draws), dtype=np.int32)
    column = np.arange(draws)
    for part, rows, cell in blocks(scored.probabilities):
        labels = _draw_labels(rows, rng.random((len(rows), draws)))
        of_label = np.take_along_axis(rows, labels, axis=1)
        nll -= np.log(of_label).sum(axis=0)
        brier += (np.einsum("nk,nk->n", rows, rows)[:, None] - 2 * of_label + 1).sum(axis=0)
        right += (labels == scored.predicted[part, None]).sum(axis=0)
        place = np.take_along_axis(cell, labels, axis=1) * draws + column
        hits += np.bincount(place.ravel(), minlength=hits.size).reshape(hits.shape).astype(np.int32)
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


def _draw_labels(rows: NDArray[np.float64], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Draw labels (n, draws) from the distribution in each row (n, K), by inversion."""
    cumulative = rows.cumsum(axis=1)
    cumulative /= cumulative[:, -1:]
    offset = np.arange(len(rows))[:, None]
    flat = np.searchsorted((cumulative + offset).ravel(), (uniform + offset).ravel(), side="right")
    labels = flat.reshape(uniform.shape) - offset * rows.shape[1]
    clipped: NDArray[np.int64] = np.clip(labels, 0, rows.shape[1] - 1)
    return clipped
