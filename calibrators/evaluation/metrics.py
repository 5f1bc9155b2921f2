"""The numbers that judge probabilities: error rate, NLL, Brier score and calibration errors.

Probabilities and labels go in, plain floats come out; `evaluate` gives them all at once.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from torch import Tensor

from calibrators.evaluation.bins import NUM_BINS, Binning, bin_edges, bin_indices
from calibrators.evaluation.outcomes import Outcomes, Vector, outcomes
from calibrators.evaluation.smooth import smooth_fixed_point

Array = ArrayLike | Tensor


def error_rate(probabilities: Array, labels: Array, predicted: Array | None = None) -> float:
    """Share of samples whose predicted label is wrong, in [0, 1]."""
    return float(1 - outcomes(probabilities, labels, predicted).correct.mean())


def nll(probabilities: Array, labels: Array) -> float:
    """Mean negative log-likelihood of the true labels, in nats; inf where one of them had probability 0."""
    return float(outcomes(probabilities, labels).nll.mean())


def brier(probabilities: Array, labels: Array) -> float:
    """Brier score: squared distance to the one-hot labels, summed over classes and averaged, in [0, 2]."""
    return float(outcomes(probabilities, labels).brier.mean())


def expected_calibration_error(
    probabilities: Array,
    labels: Array,
    predicted: Array | None = None,
    *,
    bins: int = NUM_BINS,
    binning: Binning = "width",
) -> float:
    """Top-label expected calibration error (ECE): mean |confidence - accuracy| over bins.

    The paper's section 2, on its 15 bins unless told otherwise.

    Parameters
    ----------
    probabilities : (N, K)
        Rows that sum to 1.
    labels : (N,)
        Class indices.
    predicted : (N,), optional
        Predicted labels, where ties were broken by something else than the class order.
    bins
        Number of bins M.
    binning : "width" or "mass"
        Bins of equal width (ewECE) or of equal mass (emECE; equal confidences are never split).
    """
    return binned_error(outcomes(probabilities, labels, predicted), binning, bins)


def smooth_ece(probabilities: Array, labels: Array, predicted: Array | None = None) -> float:
    """Top-label smooth calibration error, smECE of Błasiok and Nakkiran (2024), in [0, 1]."""
    scored = outcomes(probabilities, labels, predicted)
    return smooth_fixed_point(scored.confidence, scored.correct)[0]


@dataclass(frozen=True)
class Metrics:
    """What `evaluate` found; every value is lower-is-better and a share in [0, 1] except `nll` and `brier`.

    Attributes
    ----------
    samples : int
        Number of samples N.
    error_rate, nll, brier : float
        1 - accuracy; mean -log p_y in nats; squared error summed over classes.
    ece_width, ece_mass : float
        Top-label ECE over 15 bins of equal width (ewECE) and equal mass (emECE).
    smooth_ece : float
        smECE.
    """

    samples: int
    error_rate: float
    nll: float
    brier: float
    ece_width: float
    ece_mass: float
    smooth_ece: float

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics by name, JSON-ready: a value that is not finite becomes None."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


def evaluate(probabilities: Array, labels: Array, predicted: Array | None = None) -> Metrics:
    """Judge probabilities (N, K) against labels (N,) by every metric at once.

    Parameters
    ----------
    probabilities
        Rows that sum to 1; logits are refused, never guessed at.
    labels
        Class indices below K.
    predicted
        Predicted labels (N,), where ties were broken by something else than the class order.

    Raises
    ------
    InvalidDataError
        Naming the first row, class or sum that is wrong.
    """
    return metrics_of(outcomes(probabilities, labels, predicted))


def metrics_of(scored: Outcomes) -> Metrics:
    """Return the metrics of condensed outcomes."""
    return Metrics(
        samples=len(scored),
        error_rate=float(1 - scored.correct.mean()),
        nll=float(scored.nll.mean()),
        brier=float(scored.brier.mean()),
        ece_width=binned_error(scored, "width"),
        ece_mass=binned_error(scored, "mass"),
        smooth_ece=smooth_fixed_point(scored.confidence, scored.correct)[0],
    )


def binned_error(scored: Outcomes, binning: Binning, bins: int = NUM_BINS) -> float:
    """Top-label ECE of condensed outcomes."""
    index = bin_indices(scored.confidence, bin_edges(scored.confidence, binning, bins))
    return float(np.abs(_bin_sums(index, scored.residual, bins)).sum() / len(scored))


def _bin_sums(index: Any, values: Vector, bins: int) -> Vector:
    return np.bincount(index, weights=values, minlength=bins)
