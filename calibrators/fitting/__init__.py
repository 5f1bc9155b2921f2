"""Fits: from a validation set to the calibrator of least negative log-likelihood, and the evidence for it."""

from calibrators.fitting.entry import fit
from calibrators.fitting.result import Certificate, FitResult, Progress

__all__ = ["Certificate", "FitResult", "Progress", "fit"]
