"""What a fit gives back: the calibrator, its loss, and how good the optimum is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from boxcal.calibrators.calibrator import Calibrator
from boxcal.calibrators.checks import DataWarning

Progress = Callable[[float, str], None]
"""Called with the fraction done, 0 to 1, and what is being done. An exception it raises ends the fit."""


@dataclass(frozen=True)
class Certificate:
    """Evidence about an optimum.

    Attributes
    ----------
    gradient_norm : float
        Largest entry of the projected gradient of the objective in the fit's coordinates; up to about 1/N at
        a kink, where a sample sits exactly at a bound; nan for methods that are not fitted by descent.
    starts, starts_agreeing : int
        How many descents were made, and how many of them ended within 1e-6 nats of the best.
    on_boundary : tuple of str
        Parameters that ended on the edge of their range, or bounds that hold nothing back.
    uncalibrated_nll : float
        Mean negative log-likelihood of the unchanged logits; the fit's is never larger.
    evaluations : int
        How often the objective was computed.
    notes : tuple of str
        What a user should know about this optimum, in sentences.
    """

    gradient_norm: float
    starts: int
    starts_agreeing: int
    on_boundary: tuple[str, ...]
    uncalibrated_nll: float
    evaluations: int
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a plain document, with null for a gradient norm that does not apply."""
        document = asdict(self)
        if document["gradient_norm"] != document["gradient_norm"]:
            document["gradient_norm"] = None
        return document


@dataclass(frozen=True)
class FitResult:
    """A fitted calibrator and the account of its fit.

    Attributes
    ----------
    calibrator : Calibrator
    method : str
        The method fitted; for `auto`, the one chosen.
    nll : float
        Mean negative log-likelihood of the validation set, in nats.
    certificate : Certificate
    seconds : float
        Wall-clock time of the fit.
    choice : dict
        For `auto`, the cross-validated scores the choice rests on; empty otherwise.
    warnings : tuple of DataWarning
        What is probably wrong with the data, or with the method for these data.
    """

    calibrator: Calibrator
    method: str
    nll: float
    certificate: Certificate
    seconds: float
    choice: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[DataWarning, ...] = ()
