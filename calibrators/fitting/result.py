"""The result of a fit: the calibrator, its loss, and the quality of the optimum."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from boxcal.calibrators.array_calibrator import ArrayCalibrator
from boxcal.calibrators.checks import DataWarning

if TYPE_CHECKING:
    from boxcal.calibrators.calibrator import Calibrator

Progress = Callable[[float, str], None]
"""Called with the fraction done, 0 to 1, and what is being done. An exception it raises ends the fit."""


@dataclass(frozen=True)
class Certificate:
    """Evidence about an optimum.

    Attributes
    ----------
    gradient_norm : float
        Largest entry of the projected gradient of the objective in the fit's coordinates; up to about 1/N at
        a kink, where a sample sits exactly at a bound; nan for methods that are not fitted by descent. Of a
        mean of networks, that of the network with the lowest loss.
    starts, starts_agreeing : int
        Number of starting points, and how many of them ended within 1e-6 nats of the best.
    on_boundary : tuple of str
        Parameters at the limit of their range, and bounds that are never active.
    uncalibrated_nll : float
        Mean negative log-likelihood without calibration; that of the fit is never higher.
    evaluations : int
        Number of evaluations of the objective.
    notes : tuple of str
        Remarks about this optimum.
    objective : float
        What the fit minimised: the NLL plus the method's penalty.
    contains : dict
        Methods that this one contains, with their objectives; the fit's own is not above them.
    start_spread : float
        Difference between the lowest and the highest loss that the starts led to.
    saturation : float or None
        Share of a network's hidden units that are flat on the validation set; None without a network.
    """

    gradient_norm: float
    starts: int
    starts_agreeing: int
    on_boundary: tuple[str, ...]
    uncalibrated_nll: float
    evaluations: int
    notes: tuple[str, ...] = ()
    objective: float = math.nan
    contains: dict[str, float] = field(default_factory=dict)
    start_spread: float = 0.0
    saturation: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the certificate for JSON; a gradient norm that does not apply is None."""
        document = asdict(self)
        if document["gradient_norm"] != document["gradient_norm"]:
            document["gradient_norm"] = None
        return document


@dataclass(frozen=True)
class FitResult:
    """A fitted calibrator and information about its fit.

    Attributes
    ----------
    on_arrays : ArrayCalibrator
        The fitted calibrator, which takes arrays and needs no torch.
    method : str
        The fitted method; for `auto`, the selected one.
    nll : float
        Mean negative log-likelihood of the validation set, in nats.
    certificate : Certificate
    seconds : float
        Wall-clock time of the fit.
    choice : dict
        For `auto`, the cross-validated scores of the candidates; otherwise empty.
    warnings : tuple of DataWarning
        Probable problems of the data, or of the method for these data.
    unseen : tuple of (mask, ArrayCalibrator)
        For `auto`, the calibrator of each fold, which has not seen the samples (N,) of its mask: their
        answers judge the result without another fit. Empty otherwise.
    """

    on_arrays: ArrayCalibrator
    method: str
    nll: float
    certificate: Certificate
    seconds: float
    choice: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[DataWarning, ...] = ()
    unseen: tuple[tuple[NDArray[np.bool_], ArrayCalibrator], ...] = ()

    @cached_property
    def calibrator(self) -> Calibrator:
        """The fitted calibrator, which takes tensors of torch."""
        try:
            from boxcal.calibrators.calibrator import Calibrator  # noqa: PLC0415 - imports torch
        except ModuleNotFoundError as error:
            raise ImportError(
                f"`calibrator` takes tensors and needs the package {error.name}; `on_arrays` takes arrays."
            ) from error
        return Calibrator.on_tensors(self.on_arrays)
