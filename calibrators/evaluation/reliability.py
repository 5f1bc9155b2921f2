"""Reliability data, top-label or of one class: what a reliability diagram shows, as plain JSON.

Confidences and outcomes go in; bin means with their intervals, a smooth curve, a band for perfect calibration
and a histogram come out. `figure.py` draws them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from calibrators.evaluation.bins import bin_edges, bin_indices
from calibrators.evaluation.bootstrap import LEVEL, proportion_estimate
from calibrators.evaluation.outcomes import Vector
from calibrators.evaluation.smooth import SmoothedResiduals, smooth_fixed_point

CURVE_POINTS = 201
HISTOGRAM_BINS = 40
PERFECT_DRAWS = 300
NARROWEST = 0.02  # a curve smoothed less than this is all noise to the eye
FEWEST_NEAR = 4.0  # samples that a point of the curve must rest on


def reliability_data(confidence: Vector, correct: Vector, *, seed: int = 0) -> dict[str, Any]:
    """Return the data of a reliability diagram, JSON-ready.

    Parameters
    ----------
    confidence : float64 (N,)
        Probability of the predicted label, or of one class.
    correct : float64 (N,)
        1 where that label is the true one, else 0.
    seed
        Makes the simulated band reproducible.

    Returns
    -------
    dict
        `samples`, `accuracy`, `mean_confidence`; `bins` (15 of equal width, the empty ones left out), each
        with its edges, count, mean confidence, accuracy and the accuracy's 95 % interval; `curve` with
        `confidence`, `accuracy` and the `band_low`, `band_high` between which 95 % of such curves lie when
        labels are drawn from the confidences themselves, and the `bandwidth`; `histogram` with `counts` of
        40 equal bins.
    """
    return {
        "samples": len(confidence),
        "accuracy": float(correct.mean()),
        "mean_confidence": float(confidence.mean()),
        "bins": _bins(confidence, correct),
        "curve": _curve(confidence, correct, seed),
        "histogram": {
            "counts": np.histogram(confidence, bins=HISTOGRAM_BINS, range=(0.0, 1.0))[0].tolist(),
        },
    }


def _bins(confidence: Vector, correct: Vector) -> list[dict[str, float]]:
    edges = bin_edges(confidence, "width")
    index = bin_indices(confidence, edges)
    result = []
    for number in np.unique(index):
        inside = index == number
        accuracy = proportion_estimate(correct[inside])
        result.append(
            {
                "low": float(edges[number]),
                "high": float(edges[number + 1]),
                "count": int(inside.sum()),
                "confidence": float(confidence[inside].mean()),
                "accuracy": accuracy.value,
                "accuracy_low": accuracy.low,
                "accuracy_high": accuracy.high,
            }
        )
    return result


def _curve(confidence: Vector, correct: Vector, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    bandwidth = max(smooth_fixed_point(confidence, correct)[1], NARROWEST)
    drawn = rng.random((len(confidence), PERFECT_DRAWS)) < confidence[:, None]
    residuals = confidence[:, None] - np.column_stack([correct, drawn])
    mesh = np.linspace(0.0, 1.0, CURVE_POINTS)
    means, near = SmoothedResiduals(confidence, residuals).curve(bandwidth, mesh)
    supported = near >= FEWEST_NEAR
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


def reliability_svg(report: dict[str, Any]) -> bytes:
    """Draw a report's reliability diagrams, before beside after, as an SVG document."""
    from calibrators.evaluation.figure import draw_report  # noqa: PLC0415 - matplotlib loads slowly

    return draw_report(report, "svg")


def reliability_png(report: dict[str, Any]) -> bytes:
    """Draw a report's reliability diagrams, before beside after, as a PNG picture."""
    from calibrators.evaluation.figure import draw_report  # noqa: PLC0415

    return draw_report(report, "png")
