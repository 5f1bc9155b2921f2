"""Metrics of probabilities: error rate, NLL, Brier score and calibration errors.

Each function takes probabilities and labels and returns a float; `evaluate` returns all metrics.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from numpy.typing import ArrayLike

from boxcal.calibrators.evaluation.bins import NUM_BINS, Binning
from boxcal.calibrators.evaluation.classwise import ClassCells
from boxcal.calibrators.evaluation.outcomes import outcomes, with_weights
from boxcal.calibrators.evaluation.toplabel import (
    BinnedError,
    DebiasedError,
    KolmogorovSmirnovError,
    MaximumError,
    SmoothError,
)

Array = ArrayLike


def error_rate(probabilities: Array, labels: Array, predicted: Array | None = None) -> float:
    """Return the share of samples whose predicted label is wrong, in [0, 1]."""
    return float(1 - outcomes(probabilities, labels, predicted).correct.mean())


def nll(probabilities: Array, labels: Array) -> float:
    """Return the mean negative log-likelihood of the labels, in nats; inf if one has probability 0."""
    return float(outcomes(probabilities, labels).nll.mean())


def brier(probabilities: Array, labels: Array) -> float:
    """Return the Brier score: squared error, summed over classes, averaged over samples, in [0, 2]."""
    return float(outcomes(probabilities, labels).brier.mean())


def expected_calibration_error(
    probabilities: Array,
    labels: Array,
    predicted: Array | None = None,
    *,
    bins: int = NUM_BINS,
    binning: Binning = "width",
) -> float:
    """Return the top-label expected calibration error (ECE): mean |confidence - accuracy| over bins.

    Section 2 of the paper, by default with its 15 bins.

    Parameters
    ----------
    probabilities : (N, K)
        Rows that sum to 1.
    labels : (N,)
        Class indices.
    predicted : (N,), optional
        Predicted labels, if ties are not broken by the order of the classes.
    bins
        Number of bins M.
    binning : "width" or "mass"
        Bins of equal width (ewECE) or of equal mass (emECE; equal confidences are never split).
    """
    return BinnedError(outcomes(probabilities, labels, predicted), binning, bins).value


def smooth_ece(probabilities: Array, labels: Array, predicted: Array | None = None) -> float:
    """Return the top-label smooth calibration error, smECE of Błasiok and Nakkiran (2024), in [0, 1]."""
    return SmoothError(outcomes(probabilities, labels, predicted)).value


@dataclass(frozen=True)
class Metrics:
    """The metrics that `evaluate` returns; lower is better. All but `nll` and the Brier terms are in [0, 1].

    Attributes
    ----------
    samples : int
        Number of samples N.
    error_rate, nll, brier : float
        1 - accuracy; mean -log p_y in nats; squared error summed over classes.
    ece_width, ece_mass : float
        Top-label ECE over 15 bins of equal width (ewECE) and of equal mass (emECE).
    smooth_ece : float
        smECE of Błasiok and Nakkiran (2024).
    debiased_ece : float
        Root of the debiased squared calibration error over 15 bins of equal mass.
    mce : float
        Largest gap of any of 15 bins of equal width.
    ks : float
        Kolmogorov-Smirnov calibration error, bin-free.
    classwise_ece : float
        Mean over classes of the ECE of their probabilities, 15 bins of equal width.
    brier_calibration, brier_refinement : float
        The two parts of `brier`: the calibration error of those bins, and the rest.
    """

    samples: int
    error_rate: float
    nll: float
    brier: float
    ece_width: float
    ece_mass: float
    smooth_ece: float
    debiased_ece: float
    mce: float
    ks: float
    classwise_ece: float
    brier_calibration: float
    brier_refinement: float

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics by name for JSON; a value that is not finite becomes None."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


def evaluate(
    probabilities: Array,
    labels: Array,
    predicted: Array | None = None,
    *,
    sample_weight: Array | None = None,
) -> Metrics:
    """Return all metrics of probabilities (N, K) and labels (N,).

    Parameters
    ----------
    probabilities
        Rows that sum to 1. Logits are rejected.
    labels
        Class indices below K.
    predicted
        Predicted labels (N,), if ties are not broken by the order of the classes.
    sample_weight
        How much each sample counts (N,), at least 0.

    Raises
    ------
    InvalidDataError
        If a row, class, sum or weight is invalid; the message names the first.
    """
    scored = outcomes(probabilities, labels, predicted)
    if sample_weight is not None:
        scored = with_weights(scored, sample_weight)
    cells = ClassCells(scored)
    calibration = float(cells.brier_calibration(cells.hits))
    return Metrics(
        samples=len(scored),
        error_rate=1 - scored.mean(scored.correct),
        nll=scored.mean(scored.nll),
        brier=scored.mean(scored.brier),
        ece_width=BinnedError(scored, "width").value,
        ece_mass=BinnedError(scored, "mass").value,
        smooth_ece=SmoothError(scored).value,
        debiased_ece=DebiasedError(scored).value,
        mce=MaximumError(scored).value,
        ks=KolmogorovSmirnovError(scored).value,
        classwise_ece=float(cells.classwise_ece(cells.hits)),
        brier_calibration=calibration,
        brier_refinement=scored.mean(scored.brier) - calibration,
    )
