"""Data of reliability diagrams, top-label or of one class, as JSON.

The data contain bin means with intervals, a smooth curve, a band for perfect calibration and a histogram.
`figure.py` draws them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from boxcal.calibrators.evaluation.bins import bin_edges, bin_indices
from boxcal.calibrators.evaluation.bootstrap import LEVEL, proportion_estimate
from boxcal.calibrators.evaluation.classwise import ClassCells
from boxcal.calibrators.evaluation.outcomes import (
    ROWS_AT_ONCE,
    Indices,
    Matrix,
    Outcomes,
    ProbabilityRows,
    Tell,
    Vector,
    silent,
)
from boxcal.calibrators.evaluation.smooth import Confidences, SmoothedResiduals, grid_size
from boxcal.calibrators.threads import in_order, over_blocks

CURVE_POINTS = 201
CLASS_POINTS = 51
MOST_CLASSES = 12
HISTOGRAM_BINS = 40
PERFECT_DRAWS = 300
NARROWEST = 0.04  # minimum bandwidth of the curve; twice this for one class
FEWEST_NEAR = 4.0  # minimum number of samples for a point of the curve


def reliability_data(
    confidence: Vector,
    correct: Vector,
    *,
    seed: int = 0,
    points: int = CURVE_POINTS,
    narrowest: float = NARROWEST,
    weights: Vector | None = None,
    groups: Indices | None = None,
) -> dict[str, Any]:
    """Return the data of a reliability diagram for JSON.

    `confidence`: float64 (N,), probability of the predicted label, or of one class. `correct`: float64 (N,),
    1 if that label is the true one, else 0. `weights`: float64 (N,), how much each sample counts, of mean 1;
    counts are of samples. `groups`: int64 (N,), samples of one group are not independent. Returns `samples`,
    `accuracy`, `mean_confidence`; `bins` (15 of equal width, without empty ones), each with its edges,
    count, mean confidence, accuracy and the accuracy's 95 % interval; `curve` with `confidence`, `accuracy`
    and the `band_low`, `band_high` between which 95 % of such curves lie when labels are drawn from the
    confidences, and the `bandwidth`; `histogram` with `counts` of 40 equal bins.
    """
    return {
        "samples": len(confidence),
        "accuracy": _mean(correct, weights),
        "mean_confidence": _mean(confidence, weights),
        "bins": _bins(confidence, correct, weights, groups),
        "curve": _curve(confidence, correct, weights, seed=seed, points=points, narrowest=narrowest),
        "histogram": {
            "counts": np.histogram(confidence, bins=HISTOGRAM_BINS, range=(0.0, 1.0))[0].tolist(),
        },
    }


def _mean(values: Vector, weights: Vector | None) -> float:
    return float(values.mean() if weights is None else np.average(values, weights=weights))


def _bins(
    confidence: Vector, correct: Vector, weights: Vector | None, groups: Indices | None
) -> list[dict[str, float]]:
    edges = bin_edges(confidence, "width")
    index = bin_indices(confidence, edges)
    result = []
    for number in np.unique(index):
        inside = index == number
        inside_weights = None if weights is None else weights[inside]
        inside_groups = None if groups is None else groups[inside]
        accuracy = proportion_estimate(correct[inside], inside_weights, inside_groups)
        result.append(
            {
                "low": float(edges[number]),
                "high": float(edges[number + 1]),
                "count": int(inside.sum()),
                "confidence": _mean(confidence[inside], inside_weights),
                "accuracy": accuracy.value,
                "accuracy_low": accuracy.low,
                "accuracy_high": accuracy.high,
            }
        )
    return result


def _curve(
    confidence: Vector,
    correct: Vector,
    weights: Vector | None,
    *,
    seed: int,
    points: int,
    narrowest: float,
) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    confidences = Confidences(confidence, weights)
    gaps = confidence - correct
    residuals = SmoothedResiduals(confidences, (gaps if weights is None else gaps * weights)[:, None])
    bandwidth = max(float(residuals.fixed_points()[1][0]), narrowest)
    mesh = np.linspace(0.0, 1.0, points)
    grid = confidences.drawn_to_grid(correct, rng, PERFECT_DRAWS, grid_size(bandwidth))
    means, near = confidences.curve(grid, bandwidth, mesh)
    step = mesh[1]
    inside = (mesh > confidence.min() - step) & (mesh < confidence.max() + step)
    supported = inside & (near >= FEWEST_NEAR)
    accuracy = np.clip(mesh[:, None] - means, 0.0, 1.0)[supported]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(accuracy[:, 1:], [tail, 1 - tail], axis=1)
    return {
        "bandwidth": bandwidth,
        "confidence": mesh[supported].tolist(),
        "accuracy": accuracy[:, 0].tolist(),
        "band_low": low.tolist(),
        "band_high": high.tolist(),
    }


def class_reliability(
    before: Outcomes,
    after: Outcomes,
    cells: ClassCells | None = None,
    *,
    seed: int = 0,
    tell: Tell = silent,
) -> list[dict[str, Any]]:
    """Return the reliability of single classes before and after calibration: at most the 12 worst.

    The worst classes contribute most to the classwise ECE before calibration. Each entry has `class`, its
    index, `positives`, its number of samples, and the data of its diagrams `before` and `after`. `cells` are
    those of `before`, if they are known.
    """
    known = ClassCells(before) if cells is None else cells
    gaps = np.abs(known.mass - known.hits).reshape(known.num_classes, -1).sum(axis=1)
    chosen = np.sort(np.argsort(-gaps, kind="stable")[:MOST_CLASSES])
    columns = {
        name: _columns(scored.probabilities, chosen)
        for name, scored in (("before", before), ("after", after))
    }

    def work(place: int) -> dict[str, Any]:
        k = int(chosen[place])
        positive = (before.labels == k).astype(np.float64)
        sides = {
            name: reliability_data(
                values[:, place].copy(),
                positive,
                seed=seed,
                points=CLASS_POINTS,
                narrowest=2 * NARROWEST,
                weights=before.weights,
                groups=before.groups,
            )
            for name, values in columns.items()
        }
        return {"class": k, "positives": int(positive.sum()), **sides}

    result = []
    for entry in in_order(work, range(len(chosen))):
        result.append(entry)
        tell(len(result) / len(chosen))
    return result


def _columns(rows: ProbabilityRows, classes: Indices) -> Matrix:
    """Return the probabilities of some classes, (N, n)."""
    parts = over_blocks(lambda part: rows.at(part)[:, classes], rows.shape[0], ROWS_AT_ONCE)
    return np.concatenate(list(parts))


def reliability_svg(report: dict[str, Any]) -> bytes:
    """Draw the reliability diagrams of a report, before and after calibration, as SVG."""
    from boxcal.calibrators.evaluation.figure import draw_report, render  # noqa: PLC0415 - matplotlib is slow

    return render(draw_report(report), "svg")


def reliability_images(report: dict[str, Any]) -> tuple[bytes, bytes]:
    """Draw the same, and return it as SVG and as PNG."""
    from boxcal.calibrators.evaluation.figure import draw_report, render  # noqa: PLC0415

    figure = draw_report(report)
    return render(figure, "svg"), render(figure, "png")
