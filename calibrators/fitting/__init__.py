"""Fits: from a validation set to the calibrator of least negative log-likelihood, and the evidence for it."""

from boxcal.calibrators.fitting.api import fit
from boxcal.calibrators.fitting.result import Certificate, FitResult, Progress

__all__ = ["Certificate", "FitResult", "Progress", "fit"]
