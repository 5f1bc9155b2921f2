"""Evaluation of probabilities: metrics, intervals, comparisons, reliability diagrams and the report."""

from boxcal.calibrators.evaluation.metrics import (
    Metrics,
    brier,
    error_rate,
    evaluate,
    expected_calibration_error,
    nll,
    smooth_ece,
)

__all__ = [
    "Metrics",
    "brier",
    "error_rate",
    "evaluate",
    "expected_calibration_error",
    "nll",
    "smooth_ece",
]
